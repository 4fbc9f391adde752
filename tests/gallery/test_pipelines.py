"""Checkpointing under a backward in two parts, with torch alone: the parts as torch's pipelines take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.parity import cases

_FULL = partial(checkpoint, use_reentrant=False)


def _keeps_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _block() -> tuple[nn.Module, Tensor]:
    """Return a block of Llama, which has 9 parameters, and the table of its positions."""
    model = cases.MODELS["llama"].build()
    return model.layers[0], model.rotary[:8]  # type: ignore[index,return-value]  # a list of blocks, a buffer


def _in_parts(region: Callable[..., Any]) -> tuple[int, dict[str, Tensor | None]]:
    """Return how often the block runs forward, and its gradients, with a backward in two parts."""
    torch.manual_seed(0)
    block, rotary = _block()
    calls: list[int] = []
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    x_BSD = torch.randn(2, 8, 32, requires_grad=True)
    output = region(block, x_BSD, rotary)
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [x_BSD], block.parameters())
    stage_backward_weight(block.parameters(), groups)
    return len(calls), {name: each.grad for name, each in block.named_parameters()}


def _plain(block: nn.Module, *args: Tensor) -> Any:
    return block(*args)


def test_a_block_is_recomputed_for_the_input_and_for_each_group_of_parameters() -> None:
    (plain, expected), (recomputed, gradients) = _in_parts(_plain), _in_parts(_FULL)
    assert (plain, recomputed) == (1, 1 + 1 + 9)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("region", "words"),
    [
        (
            partial(
                checkpoint,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, _keeps_products),
            ),
            "Trying to backward an extra time",
        ),
        (partial(checkpoint, use_reentrant=True), "use_reentrant=False, or call .backward()"),
    ],
    ids=["a save list", "a reentrant region"],
)
def test_other_regions_raise(region: Callable[..., Any], words: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        _in_parts(region)
    assert words in f"{raised.value} {raised.value.__cause__}"
