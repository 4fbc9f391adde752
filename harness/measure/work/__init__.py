"""Operators, FLOPs and collectives of a step."""
