"""Plans that somebody keeps are those that are searched for, and nobody searches for them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from strategies.budget.kept import kept_by
from strategies.budget.planning import block_options, group_options
from strategies.budget.planning.known_plans import KnownPlans, WayToPlan
from strategies.budget.planning.planner import BudgetBelowMinimum
from tests.strategies.budget.small_steps import WIDTH, Gated, Remembering, step_of
from tests.strategies.step.test_plan_capture import captured

_SHARE = 0.8


@cache
def way() -> WayToPlan:
    model, x = Gated(blocks=2), torch.randn(8, 4, WIDTH)
    step_of(model, x)()
    graph = captured(model, x)
    return WayToPlan(graph=graph, objective="both", host_bytes=0, nests=True, is_taped=True, chunk=None)


@cache
def searched() -> KnownPlans:
    return KnownPlans([way()], "both")


class Twice(Gated):
    """Calls its blocks two times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.layers, *self.layers):
            x = block(x)
        outputs: torch.Tensor = self.head(x)
        return outputs


def test_room_on_the_host_takes_no_plan_of_repeated_blocks_away() -> None:
    model, x = Twice(blocks=2), torch.randn(8, 4, WIDTH)
    step_of(model, x)()
    ways = [replace(way(), graph=captured(model, x), host_bytes=each) for each in (0, 1 << 30)]
    alone, beside = (KnownPlans([each], "both") for each in ways)
    plain_bytes, least_bytes = alone.range_bytes()
    assert beside.range_bytes()[1] <= least_bytes < plain_bytes
    plan = beside.plan(least_bytes)
    assert (plan.host_budget_bytes, plan.predicted_peak_bytes <= least_bytes) == (1 << 30, True)


class Unsearched(KnownPlans):
    """Plans that nobody may search for."""

    @property
    def _planner(self) -> Any:
        raise AssertionError("it searches")


def known(ways: Sequence[WayToPlan] | None = None) -> KnownPlans:
    return Unsearched(ways or [way()], "both")


def between(share: float) -> int:
    plain_bytes, least_bytes = searched().range_bytes()
    return int(least_bytes + share * (plain_bytes - least_bytes))


@pytest.mark.parametrize("spare_bytes", [0, 64])
def test_a_kept_plan_is_the_one_that_was_searched_for(spare_bytes: int) -> None:
    budget_bytes = between(_SHARE)
    with kept_by(Remembering()):
        first = KnownPlans([way()], "both")
        numbers, plan = first.range_bytes(), first.plan(budget_bytes, spare_bytes)
        assert known().range_bytes() == numbers == searched().range_bytes()
        assert known().plan(budget_bytes, spare_bytes) == plan
        assert (plan.budget_bytes, plan.spare_bytes) == (budget_bytes, spare_bytes)
    assert plan.predicted_peak_bytes <= budget_bytes - spare_bytes < plan.plain_peak_bytes
    assert KnownPlans([way()], "both").plan(budget_bytes, spare_bytes) == plan


def test_a_refusal_is_kept_with_its_numbers() -> None:
    found = []
    with kept_by(Remembering()):
        for plans in (KnownPlans([way()], "both"), known()):
            with pytest.raises(BudgetBelowMinimum) as caught:
                plans.plan(between(0) - 1)
            found.append((str(caught.value), caught.value.args))
    assert found[0] == found[1]
    assert found[0][1][:2] == (between(0) - 1, between(0))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"objective": "time"}, id="another objective"),
        pytest.param({"host_bytes": 1 << 20}, id="room on the host"),
        pytest.param({"nests": False}, id="without chains and groups"),
        pytest.param({"is_taped": False}, id="without tapes"),
        pytest.param({"graph": "fixed_bytes"}, id="another step"),
        pytest.param({"graph": "operators"}, id="a slower operator"),
    ],
)
def test_what_another_plan_follows_from_is_searched_for(other: dict[str, Any]) -> None:
    graph = way().graph
    match other:
        case {"graph": "fixed_bytes"}:
            other = {"graph": replace(graph, fixed_bytes=graph.fixed_bytes + 1)}
        case {"graph": "operators"}:
            first, *rest = graph.operators
            other = {"graph": replace(graph, operators=[replace(first, seconds=first.seconds * 2), *rest])}
    with kept_by(Remembering()):
        KnownPlans([way()], "both").range_bytes()
        with pytest.raises(AssertionError, match="it searches"):
            known([replace(way(), **other)]).range_bytes()


def test_another_budget_is_searched_for() -> None:
    with kept_by(Remembering()):
        KnownPlans([way()], "both").plan(between(_SHARE))
        for budget_bytes, spare_bytes in ((between(_SHARE) + 1, 0), (between(_SHARE), 1)):
            with pytest.raises(AssertionError, match="it searches"):
                known().plan(budget_bytes, spare_bytes)


def _raise(*_: object) -> None:
    raise AssertionError("it searches")


def test_another_budget_shares_what_was_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = [between(share) for share in (0.2, 0.5, 0.9)]
    alone = [searched().plan(each) for each in budgets]
    keeper = Remembering()
    with kept_by(keeper):
        block_options._all.cache_clear()  # as in another process
        KnownPlans([way()], "both").range_bytes()
        monkeypatch.setattr(block_options.CallOptions, "found", _raise)
        monkeypatch.setattr(group_options, "_thinned", _raise)
        for budget_bytes, plan in zip(budgets, alone, strict=True):
            block_options._all.cache_clear()
            assert KnownPlans([way()], "both").plan(budget_bytes) == plan
    found = {text for text in keeper.texts.values() if "options" in text}
    assert len(found) == 1
    assert all("choices" in text for text in found)
    assert not alone[0].is_plain


def test_what_says_something_else_is_searched_for() -> None:
    keeper = Remembering()
    with kept_by(keeper):
        plan, numbers = KnownPlans([way()], "both").plan(between(_SHARE)), between(0)
        keeper.texts = dict.fromkeys(keeper.texts, '["of another kind"]')
        again = KnownPlans([way()], "both")
        assert again.plan(between(_SHARE)) == plan
        assert again.range_bytes()[1] == numbers
