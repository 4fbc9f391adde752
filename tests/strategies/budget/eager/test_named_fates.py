"""Fates by name: gradients are bitwise those of the plain block, and what is written to is not made again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import StrategyError
from strategies.budget.eager.named_fates import enclose
from strategies.regions.fates import EVERY_OPERATOR, Fate, Rules
from tests.strategies.budget.eager.test_planned_block import BETWEEN, WIDTH, Body, trained
from tests.strategies.meters import Meter, measure


class Middle(Body):
    """The part of a block that a row of the table does."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self._between(self, x)
        return outputs


class Block(nn.Module):
    """A linear, the part, and two readers of what it makes."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(WIDTH, 2 * WIDTH), middle, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.up(x).tanh())
        outputs: Tensor = self.down(y).sigmoid() * y.exp().mean(-1, keepdim=True)
        return outputs


def made_block(between: Callable[[Any, Tensor], Any]) -> Block:
    torch.manual_seed(0)
    return Block(Middle(between))


def rules(fate: Fate, base: Fate = Fate.KEEP) -> dict[str, Rules]:
    return {"middle": ((EVERY_OPERATOR, fate),), "": ((EVERY_OPERATOR, base),)}


FATES: dict[str, dict[str, Rules]] = {
    "recomputed": rules(Fate.RECOMPUTE),
    "discarded": rules(Fate.DISCARD),
    "offloaded": rules(Fate.OFFLOAD),
    "kept alone": rules(Fate.KEEP, Fate.DISCARD),
    "all discarded": {"": ((EVERY_OPERATOR, Fate.DISCARD),)},
    "every second operator": {
        "": (("aten.[a-m]*", Fate.DISCARD), ("aten.s*", Fate.OFFLOAD), (EVERY_OPERATOR, Fate.KEEP))
    },
}


@pytest.mark.parametrize("fates", FATES.values(), ids=FATES)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_gradients_are_bitwise_those_of_the_plain_block(
    between: Callable[[Any, Tensor], Any], fates: dict[str, Rules]
) -> None:
    x = torch.randn(6, WIDTH)
    plain, block = made_block(between), made_block(between)
    enclose({"layers.0": block}, {"layers.0": fates})
    expected, found = trained(plain, x), trained(block, x)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


COLUMN = 2 * 6 * WIDTH * 4
"""Bytes of what the middle of a block makes."""
SAVED = {
    # of exp: its result, which `down` and the other exp read too
    "recomputed": (rules(Fate.RECOMPUTE), 0),
    "discarded": (rules(Fate.DISCARD), COLUMN),
}


@pytest.mark.parametrize(("fates", "freed"), SAVED.values(), ids=SAVED)
def test_what_two_others_have_saved_is_freed_by_discarding_alone(fates: dict[str, Rules], freed: int) -> None:
    x = torch.randn(6, WIDTH, requires_grad=True)
    plain, block = (made_block(lambda _, x: x.sin()) for _ in range(2))
    enclose({"layers.0": block}, {"layers.0": fates})
    before, after = measure(plain, x), measure(block, x)
    # sin has saved its input, which stays: it is made before
    assert before.saved_bytes - after.saved_bytes == freed
    assert after.backward_flops == before.backward_flops


@pytest.mark.parametrize("fate", [Fate.RECOMPUTE, Fate.DISCARD, Fate.OFFLOAD], ids=lambda fate: fate.value)
def test_a_result_that_is_changed_before_backward_is_refused_as_without(fate: Fate) -> None:
    class Shown(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.middle(self.up(x).tanh())
            self.shown = y
            outputs: Tensor = self.down(y)
            return outputs

    for fates in (None, rules(fate)):
        block = Shown(Middle(lambda _, x: x.sin()))
        if fates is not None:
            enclose({"layers.0": block}, {"layers.0": fates})
        outputs = block(torch.randn(6, WIDTH))
        block.shown.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.sum().backward()


def test_an_input_that_is_changed_before_backward_is_refused() -> None:
    block, x = made_block(lambda _, x: x.sin()), torch.randn(6, WIDTH)
    enclose({"layers.0": block}, {"layers.0": {"": ((EVERY_OPERATOR, Fate.DISCARD),)}})
    outputs = block(x)
    x.mul_(2)
    with pytest.raises(StrategyError, match=r"reads a float32 tensor of \[6, 8\] that was changed in place"):
        outputs.sum().backward()


def test_nothing_of_a_step_is_left_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        for fates in FATES.values():
            block = made_block(BETWEEN["dropout"])
            enclose({"layers.0": block}, {"layers.0": fates})
            given = torch.randn(6, WIDTH).requires_grad_()
            outputs = block(given)
            alive = weakref.ref(outputs.untyped_storage()), weakref.ref(given)
            outputs.sum().backward()
            del outputs, given
            assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_what_stays_is_held_no_longer_than_without() -> None:
    block, x = made_block(lambda _, x: x.sin()), torch.randn(6, WIDTH, requires_grad=True)
    enclose({"layers.0": block}, {"layers.0": rules(Fate.DISCARD)})
    peaks = []
    for made in (made_block(lambda _, x: x.sin()), block):
        found: list[int] = []
        with Meter(x, *made.parameters()) as meter:
            made.down.register_forward_hook(
                lambda *_, meter=meter, found=found: found.append(meter.alive_bytes(on_host=False))
            )
            made(x)
        peaks += found
    assert peaks[1] <= peaks[0]
