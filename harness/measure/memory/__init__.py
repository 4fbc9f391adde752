"""Bytes of live storages, their timeline, and what the allocator says."""
