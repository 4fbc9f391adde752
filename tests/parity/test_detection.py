"""The silent defects of activation checkpointing: outputs and loss are right, and nothing is raised.

Each is built with torch's own checkpoint on a small module, beside a control that differs in the defect only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from harness.measure.parity.compare import compare_steps
from harness.records.parity_result import PARTS, Parity
from tests.toy_trainee import toy_batches, toy_steps, toy_trainee

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Region = Callable[[nn.Module, Tensor], Tensor]

WIDTH = 8


class Dropping(nn.Module):
    """Two linear layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(nn.functional.dropout(self.up(x), 0.5, self.training))


class Counting(nn.Module):
    """A linear layer whose result depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.down(torch.sin(self.up(x) * self.calls))


class Steady(Counting):
    """The same, with a counter that stands still."""

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.sin(self.up(x) * self.calls))


class Unread(Counting):
    """The same, with a counter that nothing reads."""

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.down(torch.sin(self.up(x)))


class InPlace(nn.Module):
    """A matmul whose result is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.sin(self.up(x).mul_(2)))


class OutOfPlace(InPlace):
    """The same mathematics without the change in place."""

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.sin(self.up(x).mul(2)))


class Normalising(nn.Module):
    """A batch normalisation, which updates its statistics when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.up(x))


class Frozen(Normalising):
    """The same with the statistics frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()


def biased() -> nn.Module:
    """Return linear layers with a bias: their operator is `addmm`, not `mm`."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def unbiased() -> nn.Module:
    """Return linear layers whose operator is `mm`."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def whole(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """Checkpoint the whole module."""
    outputs: Tensor = checkpoint(module, x, use_reentrant=False, **options)
    return outputs


def saving_matmuls(*, mutation: bool) -> Contexts:
    """Return the contexts that save every `mm`."""
    return partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default],
        allow_cache_entry_mutation=mutation,
    )


def parity_of(build: Callable[[], nn.Module], region: Region, *, count: int = 1) -> Parity:
    """Compare `count` steps of the module inside `region` with the plain module."""
    variant = toy_trainee(build, call=lambda model: partial(region, model))
    return compare_steps(
        toy_steps(toy_trainee(build), count=count), toy_steps(variant, count=count), count=count
    )


def unequal_parts(parity: Parity) -> dict[str, str]:
    """Return the parts that differ, with the name that differs first."""
    parts = {part: getattr(parity, part) for part in PARTS}
    return {part: found.first_difference.name for part, found in parts.items() if not found.equal}


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A module and a region that silently change the result, and the pair that must raise no alarm.

    `differs` is every part that differs after the first step, with the first name.
    """

    build: Callable[[], nn.Module]
    region: Region
    control_build: Callable[[], nn.Module]
    control_region: Region
    differs: dict[str, str]


DEFECTS = [
    pytest.param(
        Defect(
            build=Dropping,
            region=partial(whole, preserve_rng_state=False),
            control_build=Dropping,
            control_region=whole,
            differs={"gradients": "down.weight", "rng_state": "cpu", "parameters": "up.weight"},
        ),
        id="dropout is drawn anew when the RNG state is not preserved",
    ),
    pytest.param(
        Defect(
            build=Counting,
            region=whole,
            control_build=Steady,
            control_region=whole,
            differs={"gradients": "down.weight", "state": "calls", "parameters": "up.weight"},
        ),
        id="a region depends on a call counter",
    ),
    pytest.param(
        Defect(
            build=Unread,
            region=whole,
            control_build=Steady,
            control_region=whole,
            differs={"state": "calls"},
        ),
        id="calls are counted twice, for whoever reads the number",
    ),
    pytest.param(
        Defect(
            build=InPlace,
            region=partial(whole, context_fn=saving_matmuls(mutation=True)),
            control_build=OutOfPlace,
            control_region=partial(whole, context_fn=saving_matmuls(mutation=False)),
            differs={"gradients": "down.weight", "parameters": "up.weight"},
        ),
        id="a saved matmul is changed in place",
    ),
    pytest.param(
        Defect(
            build=Normalising,
            region=whole,
            control_build=Frozen,
            control_region=whole,
            differs={"buffers": "norm.running_mean"},
        ),
        id="batch statistics are updated twice",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_silent_defect_is_named_although_outputs_and_loss_are_equal(defect: Defect) -> None:
    assert unequal_parts(parity_of(defect.build, defect.region)) == defect.differs


@pytest.mark.parametrize("defect", DEFECTS)
def test_its_control_raises_no_alarm(defect: Defect) -> None:
    assert unequal_parts(parity_of(defect.control_build, defect.control_region, count=3)) == {}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_plain_module_equals_itself(defect: Defect) -> None:
    assert unequal_parts(parity_of(defect.build, lambda model, x: model(x), count=3)) == {}


class BackwardOperators(TorchDispatchMode):
    """Counts the operators that run in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.is_backward = False
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_backward:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def backward_operators(build: Callable[[], nn.Module], region: Region) -> Counter[str]:
    """Return what runs in one backward pass of the module inside `region`."""
    model = toy_trainee(build).model
    (x,) = toy_batches(1, 4, WIDTH)[0].inputs
    operators = BackwardOperators()
    with operators:
        loss = region(model, x).square().mean()
        operators.is_backward = True
        loss.backward()  # type: ignore[no-untyped-call]
    return operators.counts


SAVING = partial(whole, context_fn=saving_matmuls(mutation=False))


def test_a_save_list_that_never_matches_is_seen_by_its_counts_alone() -> None:
    assert unequal_parts(parity_of(biased, SAVING, count=3)) == {}
    assert backward_operators(biased, SAVING) == backward_operators(biased, whole)


def test_a_save_list_that_matches_spares_the_matmul_that_early_stop_would_recompute() -> None:
    assert unequal_parts(parity_of(unbiased, SAVING, count=3)) == {}
    spared = backward_operators(unbiased, whole) - backward_operators(unbiased, SAVING)
    assert spared["aten.mm.default"] == 1
