"""Formats of a report: HTML, Markdown, CSV."""
