"""The values of `ac.split_backward`, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.base import StrategyError

MODES = ("hold", "again", "torch")
"""Fates of recomputed tensors between the parts of a backward.

`hold`: what the weight part needs stays; `again`: all goes, and the region runs once more for the weight
part; `torch`: torch's checkpoint as it is.
"""


def require_split_backward(value: str, modes: Sequence[str] = MODES) -> None:
    """Refuse another value of `ac.split_backward`. Raises StrategyError: with those that there are."""
    if value not in modes:
        raise StrategyError("ac.split_backward", f"must be one of {', '.join(modes)}, got {value!r}")
