"""How a report is written: HTML, Markdown, CSV."""
