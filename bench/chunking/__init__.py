"""Chunk plans: bytes and time."""
