"""Modules as users write them, each with the verdict that it deserves: what the audit runs."""
