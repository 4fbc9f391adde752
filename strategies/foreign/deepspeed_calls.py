"""Activation checkpointing of DeepSpeed around blocks; needs the extra `acbench[deepspeed]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from strategies.regions import blocks


def switch_on(model: nn.Module, *, layers_fqn: str, use_reentrant: bool) -> None:
    """Let each block of a container run in the function that DeepSpeed's pipelines call for their layers."""
    function = checkpointing.checkpoint if use_reentrant else checkpointing.non_reentrant_checkpoint
    for block in blocks.children_of(model, layers_fqn).values():
        block.forward = partial(_checkpointed, function, block.forward)  # type: ignore[method-assign]


def _checkpointed(
    function: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the results of a checkpointed forward; only one of the functions takes keywords."""
    count = len(args)

    def of_positions(*inputs: Any) -> Any:
        return forward(*inputs[:count], **dict(zip(kwargs, inputs[count:], strict=True)))

    return function(of_positions, *args, *kwargs.values())
