"""Operator graphs, their storages, and what they cost in bytes and seconds: the project's one cost model."""
