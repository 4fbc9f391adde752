"""What a strategy does at the stages that it does not write itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from strategies.base import Observation, PlannedStep, Strategy, StrategyError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Alone(Strategy):
    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (it looks at nothing)
        return model


_MODEL = nn.Linear(2, 2)
_STRATEGY = _Alone()


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        pytest.param(lambda it: it.step_planner, None, id="it plans from no step"),
        pytest.param(lambda it: it.chunk_offers, None, id="it offers no plans"),
        pytest.param(lambda it: it.follows, False, id="it follows no other budget"),
        pytest.param(lambda it: it.for_step(PlannedStep(), {}, "key"), _STRATEGY, id="any step will do"),
        pytest.param(lambda it: it.has_loss(_MODEL), False, id="the loss stays outside"),
        pytest.param(lambda it: it.check_compilation("ac_first", "model"), None, id="compiled as you like"),
        pytest.param(lambda it: it.needs_compiler, False, id="it runs without a compiler"),
        pytest.param(lambda it: it.partitions(_MODEL, "inductor"), {}, id="torch splits the graphs"),
        pytest.param(lambda it: it.check_units(_MODEL, ["0"]), None, id="any units"),
        pytest.param(lambda it: it.views, (), id="nothing to show"),
    ],
)
def test_a_strategy_takes_part_in_no_stage_that_it_does_not_write(
    at: Callable[[Strategy], object], expected: object
) -> None:
    assert at(_STRATEGY) == expected


def test_a_strategy_stands_around_no_call_unless_it_says_so() -> None:
    with pytest.raises(StrategyError) as refused:
        _STRATEGY.call_site(_MODEL)
    assert str(refused.value) == "wrap_order: call_site does not suit _Alone; use inside_fsdp"


@pytest.mark.parametrize(
    ("first", "second", "named", "never_fired"),
    [
        pytest.param((("a",), ("a",)), (("a",), ()), ("a",), (), id="fired in the second stage"),
        pytest.param((("a",), ("a",)), (("a",), ("a",)), ("a",), ("a",), id="fired in none"),
        pytest.param(
            ((), ()), (("a", "b"), ("b",)), ("a", "b"), ("b",), id="named in the second stage alone"
        ),
    ],
)
def test_stages_show_together_what_each_of_them_names(
    first: tuple[tuple[str, ...], tuple[str, ...]],
    second: tuple[tuple[str, ...], tuple[str, ...]],
    named: tuple[str, ...],
    never_fired: tuple[str, ...],
) -> None:
    one, two = (Observation(named=each, never_fired=never) for each, never in (first, second))
    found = one.joined(two)
    assert (found.named, found.never_fired) == (named, never_fired)
