"""Fates of values between forward and backward, by the operators that make them."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

EVERY_OPERATOR = "*"


class Fate(Enum):
    """The end of what operators make, between forward and backward."""

    KEEP = "keep"
    """It stays where autograd saves it."""
    RECOMPUTE = "recompute"
    """It is made again in backward; what an operator elsewhere reads or saves stays."""
    DISCARD = "discard"
    """It is made again in backward, whoever has saved it."""
    OFFLOAD = "offload"
    """It waits in host memory."""


Rules: TypeAlias = "tuple[tuple[str, Fate], ...]"
"""Fates inside a module by patterns of operators, of which the first that matches counts."""
