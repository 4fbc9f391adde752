"""Plans as code that runs."""
