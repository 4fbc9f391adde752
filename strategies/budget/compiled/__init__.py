"""Planned blocks in compiled graphs."""
