"""Sharding candidates of single operators."""
