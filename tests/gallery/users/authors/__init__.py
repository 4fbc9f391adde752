"""Modules of those who know how the comparison works."""
