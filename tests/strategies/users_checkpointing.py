"""Functions as users give them to `ac=python`, right and wrong."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from tests.strategies.toys import Block, toy

VALUE = 3


def in_place(model: nn.Module) -> None:
    """Checkpoint every block."""
    for block in model.get_submodule("layers").children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def by_torchs_wrapper(model: nn.Module) -> None:
    """Put torch's wrapper around every block."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


def all_of_it(model: nn.Module) -> nn.Module:
    """Return torch's wrapper around the model, in another one around blocks."""
    by_torchs_wrapper(model)
    return offload_wrapper(checkpoint_wrapper(model))


def returned(model: nn.Module, *, times: int) -> nn.Module:
    """Return the model."""
    model.times = times  # type: ignore[assignment]
    return model


def nothing(_model: nn.Module) -> None:
    """Change nothing."""


def another(_model: nn.Module) -> nn.Module:
    return toy()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x)
        return outputs


def around(model: nn.Module) -> nn.Module:
    return Around(model)


def more(model: nn.Module) -> None:
    model.scale = nn.Parameter(torch.ones(1))


def a_number(_model: nn.Module) -> Any:
    return VALUE


def needs_a_library(_model: nn.Module) -> None:
    importlib.import_module("no_such_library")


def raises(_model: nn.Module) -> None:
    raise KeyError("no such block")


def exits(_model: nn.Module) -> None:
    raise SystemExit(3)


def takes_nothing() -> None:
    """Take no model."""


def patches_the_class(_model: nn.Module) -> None:
    """Triple the gradient of every block once, as libraries that patch classes guard themselves."""
    if not getattr(Block, "is_patched", False):
        plain = Block.forward
        Block.is_patched = True  # type: ignore[attr-defined]

        def forward(self: Block, *args: Any, **kwargs: Any) -> Tensor:
            outputs = plain(self, *args, **kwargs)
            return outputs * 3 - (outputs * 2).detach()

        Block.forward = forward  # type: ignore[method-assign]


def patches_torch(_model: nn.Module) -> None:
    nn.functional.linear = partial(nn.functional.linear)


def sets_the_default(_model: nn.Module) -> None:
    torch.set_default_dtype(torch.float64)


def compiles(model: nn.Module) -> None:
    blocks: Any = model.layers
    blocks[0] = torch.compile(blocks[0], backend="eager")


def saves_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep products, as a policy of torch."""
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
