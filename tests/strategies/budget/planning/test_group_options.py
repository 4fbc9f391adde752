"""Which blocks may be in a group, and what groups bring to plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from strategies.budget.eager.carrying_out import enclose
from strategies.budget.planning.planner import Planner
from strategies.estimate import machine
from strategies.regions.blocks import ModelModules
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.eager.test_carried_out import trained
from tests.strategies.budget.planning.grouping_by_hand import groups_of
from tests.strategies.budget.small_steps import (
    WIDTH,
    Gated,
    GatedBlock,
    measured_peak_bytes,
    remembering,
    step_of,
)
from tests.strategies.step.test_plan_capture import captured

X = torch.randn(8, 32, WIDTH)
BLOCKS = 12
"""Of fewer blocks the inputs are so small beside one block's backward that no group is needed."""


@pytest.fixture(autouse=True)
def without_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare groups with blocks alone by the same search: how far generations come is chance."""
    monkeypatch.setattr("strategies.budget.planning.planner._IN_VAIN", 0)


@cache
def graph() -> StepGraph:
    return captured(Gated(blocks=BLOCKS), X)


@cache
def planners() -> tuple[Planner, Planner]:
    """Plans with blocks alone, and with groups."""
    return remembering(Planner(graph(), nests=False)), remembering(Planner(graph()))


def test_groups_reach_smaller_peaks_and_never_beat_the_bound() -> None:
    alone, groups = planners()
    assert groups.minimum_feasible_bytes < alone.minimum_feasible_bytes
    for budget in (groups.minimum_feasible_bytes, alone.minimum_feasible_bytes - 1):
        plan = groups.plan(budget)
        assert any(block.group for block in plan.blocks)
        assert plan.proven_minimum_bytes <= plan.predicted_peak_bytes <= budget
        assert plan.extra_flops >= plan.lower_bound_extra_flops > 0
    for share in (1.0, 1.2, 1.5):
        budget = int(share * alone.minimum_feasible_bytes)
        assert groups.plan(budget).extra_flops <= alone.plan(budget).extra_flops


def test_the_smallest_plan_is_carried_out_to_the_byte() -> None:
    plan = planners()[1].plan(planners()[1].minimum_feasible_bytes)
    planned = Gated(blocks=BLOCKS)
    enclose(plan, ModelModules(blocks=planned.blocks))
    (expected, _), (found, flops) = trained(Gated(blocks=BLOCKS), X), trained(planned, X)
    assert all(map(torch.equal, expected, found))
    assert flops == graph().flops + plan.extra_flops
    assert measured_peak_bytes(planned, [X], step_of(planned, X)) == plan.predicted_peak_bytes


def test_a_plan_says_which_blocks_are_in_which_group_and_why() -> None:
    plan = planners()[1].plan(planners()[1].minimum_feasible_bytes)
    first, second = [block for block in plan.blocks if block.group][:2]
    text = plan.describe()
    assert f"\n{first.fqn}: in the group of {first.group} to layers." in text
    assert "which holds this input alone; the second forward of the group runs " in first.why
    assert (
        f"which makes this input of {X.nbytes} bytes again; the second forward of the group runs "
        in second.why
    )


class Ending(GatedBlock):
    """A block whose last operator is chosen."""

    def __init__(self, end: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x, super().forward(x))


class Between(Gated):
    """Runs something between its blocks."""

    def __init__(self, between: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__(blocks=3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for block in self.layers:
            values.append(block(self.between(values)))
        outputs: Tensor = self.head(values[-1])
        return outputs


def ending(end: Callable[[Tensor, Tensor], Tensor]) -> Gated:
    model = Gated(blocks=3)
    model.layers = nn.ModuleList(Ending(end) for _ in range(3))
    return model


MODELS = {
    "a chain": (lambda: Gated(blocks=3), [(0, 1), (0, 2), (1, 2)]),
    "a view between": (lambda: Between(lambda each: each[-1].view(16, 16, WIDTH)), [(0, 1), (0, 2), (1, 2)]),
    "an operator between": (lambda: Between(lambda each: each[-1] * 2), []),
    "a write between": (lambda: Between(lambda each: each[-1].add_(0) if len(each) > 1 else each[-1]), []),
    "a skip over a block": (lambda: Between(lambda each: each[-1] + each[0]), []),
    "the block needs its output": (lambda: ending(lambda _, y: y.tanh()), []),
    "a batch norm, which may not run again": (
        lambda: ending(
            lambda _, y: nn.functional.batch_norm(y, torch.zeros(32), torch.ones(32), training=True)
        ),
        [],
    ),
}


@pytest.mark.parametrize(("model", "spans"), MODELS.values(), ids=MODELS)
def test_blocks_of_which_each_reads_what_the_one_before_makes(
    model: Callable[[], Gated], spans: list[tuple[int, int]]
) -> None:
    found = groups_of(captured(model(), X.clone()))
    assert [(start, end) for start, end, _ in found.all()] == spans


def test_there_are_options_between_two_of_a_group() -> None:
    found = planners()[1]._groups
    assert found is not None
    pairs = [(start, end, pair) for start, end, options in found.all() for pair in pairwise(options)]
    start, end, (low, high) = max(pairs, key=lambda each: each[2][0].cost - each[2][1].cost)
    finer = found.options_of(start, end, (low.total, high.total))
    assert all(low.total <= each.total <= high.total for each in finer)
    assert all(low.cost >= each.cost >= high.cost for each in finer)
    assert len(finer) > 2


def test_equal_blocks_share_the_options_by_which_groups_know_them() -> None:
    planner = planners()[1]
    kinds = {caller.key for caller in planner._callers}
    assert len({id(stage.options) for stage in planner._stages}) == len(kinds) < BLOCKS


def test_seconds_of_a_group_have_those_of_following_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.PYTHON_S, "taped", 1.0)
    planner = Planner(graph(), objective="time")
    plan = planner.plan(planner.minimum_feasible_bytes)
    assert any(block.group for block in plan.blocks)
    followed = {block.fqn for block in plan.blocks if not block.plain and not block.rerun}
    assert plan.extra_s > sum(len(call.operators) for call in graph().calls if call.fqn in followed)
