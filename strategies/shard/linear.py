"""Sharding candidates of a linear layer: the door that programs outside use."""

from strategies.shard.operators.linear import candidates

__all__ = ["candidates"]
