"""A context in which nothing is dropped out, whatever a model asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPPING = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout,
    torch.dropout, torch.native_dropout, torch.alpha_dropout, torch.feature_dropout,
    torch.feature_alpha_dropout,
)  # fmt: skip
_IN_PLACE = (torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_)

_OFF: Mapping[Callable[..., Any], tuple[int, str, Any]] = {
    **dict.fromkeys(_DROPPING[:6], (2, "training", False)),
    **dict.fromkeys((*_DROPPING[6:], *_IN_PLACE), (2, "train", False)),
    functional.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    functional.multi_head_attention_forward: (10, "dropout_p", 0.0),
}
"""Functions that drop out: position and name of the argument that says so, and what switches it off."""

STILL = "dropout: off in the comparison with the dense model, whose random numbers a shard does not draw"
"""What a record says of a trial whose proof needs `WithoutDropout`."""


class WithoutDropout(TorchFunctionMode):
    """Switches off dropout in calls of torch's functions.

    A shard draws other random numbers than the whole, so that nothing could be compared. Modes of modules
    stay, because they decide more than dropout.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, without dropout."""
        named = dict(kwargs or {})
        if func in _OFF:
            position, name, off = _OFF[func]
            if position < len(args):
                args = (*args[:position], off, *args[position + 1 :])
            else:
                named[name] = off
        return func(*args, **named)
