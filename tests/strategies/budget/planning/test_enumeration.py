"""Plans of small networks are as cheap as the cheapest of all decisions, in blocks of many shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, combinations, product

import pytest
import torch
from torch import nn

from strategies.budget.planning.block_program import PlannedCall
from strategies.budget.planning.planner import Planner
from strategies.budget.planning.simulation import (
    PLAIN,
    RANDOM_STATE_BYTES,
    Decision,
    Effect,
    effect_of,
    peak_bytes,
)
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.small_steps import WithBlocks
from tests.strategies.step.test_plan_capture import captured

ROWS = 512
SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
"""Budgets between the smallest and the plain peak."""


class Residual(nn.Module):
    """`x + body(x)`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = x + self.body(x)
        return outputs


class Blocks(WithBlocks):
    """Blocks, one after another."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


def linear(width: int, to: int) -> nn.Module:
    return nn.Linear(width, to, bias=False)


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "a funnel whose blocks save their outputs": lambda: [
        nn.Sequential(linear(a, b), nn.Tanh(), linear(b, b), nn.Tanh())
        for a, b in ((16, 64), (64, 32), (32, 16))
    ],
    "residual blocks": lambda: [
        Residual(nn.Sequential(linear(16, 48), nn.GELU(), linear(48, 16))) for _ in range(3)
    ],
    "residual blocks whose output is saved": lambda: [
        nn.Sequential(Residual(nn.Sequential(linear(16, 48), nn.GELU(), linear(48, 16))), nn.Tanh())
        for _ in range(2)
    ],
    "chains of cheap operators": lambda: [
        nn.Sequential(linear(16, 16), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Tanh()) for _ in range(2)
    ],
    "one wide block among narrow ones": lambda: [
        nn.Sequential(linear(16, to), nn.ReLU(), linear(to, 16), nn.Tanh()) for to in (16, 256, 16)
    ],
}


@cache
def graph_of(name: str) -> StepGraph:
    torch.manual_seed(0)
    return captured(Blocks(NETWORKS[name]()), torch.randn(ROWS, 16))


def decisions(call: PlannedCall) -> Iterator[Decision]:
    """Yield every decision that keeps some storages of a call and lets the others run again."""
    program = call.program
    free = [s for s in range(len(program.nbytes)) if s not in program.pinned | program.older]
    yield PLAIN
    for kept in chain.from_iterable(combinations(free, count) for count in range(len(free) + 1)):
        keep = frozenset(kept) | program.pinned
        fleeting = sorted(program.fleeting - keep)
        for again in chain.from_iterable(combinations(fleeting, n) for n in range(len(fleeting) + 1)):
            yield Decision(keep=keep, again=frozenset(again))


def columns(call: PlannedCall) -> list[Effect]:
    """Return the effects of all decisions for a call, each once."""
    found: dict[tuple[object, ...], Effect] = {}
    for decision in decisions(call):
        effect = effect_of(call, decision, random_state_bytes=RANDOM_STATE_BYTES["cpu"])
        key = effect.flops, tuple(sorted(effect.gains.items())), tuple(sorted(effect.peaks.items()))
        found.setdefault(key, effect)
    return list(found.values())


@cache
def best_of_all(name: str) -> list[tuple[int, int]]:
    """Return peak and FLOPs of every combination of decisions."""
    graph = graph_of(name)
    calls = Planner(graph)._calls  # the calls as the planner has them
    return [
        (peak_bytes(graph, effects), sum(effect.flops for effect in effects))
        for effects in product(*map(columns, calls))
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_no_other_decision_is_cheaper(name: str) -> None:
    planner = Planner(graph_of(name))
    smallest, plain = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    assert smallest < plain
    for share in SHARES:
        budget = int(smallest + share * (plain - smallest))
        cheapest = min((flops for peak, flops in best_of_all(name) if peak <= budget), default=None)
        # chains and groups of blocks are decisions too, which are not enumerated
        assert cheapest is None or planner.plan(budget).extra_flops <= cheapest, share


class Applied(nn.Module):
    """A function of a scaled input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


class Recurrent(nn.Module):
    """A recurrent layer, whose saved values no plan makes again for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x.unsqueeze(1))[0].squeeze(1).sin()
        return outputs


WITHOUT_PRODUCTS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a chain of elementwise operators": (lambda: Applied(lambda x: x.sin().exp().cos()), False),
    "index_add": (lambda: Applied(lambda x: x.index_add(0, torch.arange(ROWS), x.sin()).cos()), False),
    "a transform": (lambda: Applied(lambda x: torch.fft.fft(x).real.sin().cos()), True),
    "an LSTM": (Recurrent, True),
}


@pytest.mark.parametrize(("make", "has_flops"), WITHOUT_PRODUCTS.values(), ids=WITHOUT_PRODUCTS)
def test_no_plan_runs_anything_again_for_nothing(make: Callable[[], nn.Module], has_flops: bool) -> None:
    planner = Planner(captured(Blocks([make(), make()]), torch.randn(ROWS, 16)))
    assert planner.minimum_feasible_bytes < planner.plain_peak_bytes
    plan = planner.plan(planner.minimum_feasible_bytes)
    assert bool(plan.extra_flops) is has_flops
    assert plan.extra_s > 0
    assert f"{plan.extra_s * 1e3:.3g} ms more" in plan.describe()
