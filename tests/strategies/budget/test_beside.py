"""Modules beside the blocks: which a plan decides about, and what happens where they are called otherwise."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import StrategyError
from strategies.budget import carrying_out
from strategies.budget.call_sizes import OTHER_MODULES
from strategies.budget.plan import Plan
from strategies.budget.planning import Chosen
from strategies.budget.simulation import Decision
from tests.strategies.budget.idioms import BESIDE, TOKENS, WIDTH, Model, Worded
from tests.strategies.budget.small_steps import measured_peak_bytes, step_of
from tests.strategies.budget.test_idioms import BUDGET, examine, planner_of, rows

EMBEDDED, HEADED = ["words", "layers.0"], ["norm", "head"]
CALLS = {
    "an embedding before": [EMBEDDED, [], HEADED],
    "positions that the model adds": [[], [], HEADED],
    "an embedding scaled in place": [EMBEDDED, [], HEADED],
    "an embedding that is looked at": [EMBEDDED, [], HEADED],
    "an embedding without gradients": [[], [], HEADED],
    "a head called twice": [EMBEDDED, [], HEADED],
    "a head that is the embedding": [EMBEDDED, [], ["norm"]],
    "a head of the last token": [EMBEDDED, [], HEADED],
    "a head of tokens in another order": [EMBEDDED, [], HEADED],
    "a norm written in place": [EMBEDDED, [], HEADED],
    "a norm that others save": [EMBEDDED, [], HEADED],
    "a norm called twice": [EMBEDDED, [], HEADED],
    "a norm between blocks": [EMBEDDED, ["middle", "layers.1"], HEADED],
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_runs_beside_the_blocks_is_part_of_a_call(name: str) -> None:
    graph = planner_of(BESIDE[name](), rows(), 0)._graph
    assert [call.modules for call in graph.calls] == CALLS[name]
    for call in graph.calls:
        names = [graph.operators[index].name for index in call.operators]
        assert names[call.first_own] == (
            "aten.addmm.default" if call.fqn in {"layers.0", "layers.1"} else names[0]
        )
        assert [graph.operators[index].ordinal for index in call.operators] == list(range(len(names)))


class Turns(Worded):
    """Can be called in other ways than it was planned."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self, (x[..., 0].abs() * TOKENS).long() % TOKENS)


def as_planned(model: Turns, tokens: Tensor) -> Tensor:
    outputs: Tensor = model.head(model.norm(model.through(model.words(tokens))))
    return outputs


def without_embedding(model: Turns, tokens: Tensor) -> Tensor:
    outputs: Tensor = model.head(model.norm(model.through(model.places(tokens))))
    return outputs


def norm_alone(model: Turns, tokens: Tensor) -> Tensor:
    outputs: Tensor = model.norm(model.through(model.words(tokens)))
    return outputs


def head_alone(model: Turns, tokens: Tensor) -> Tensor:
    outputs: Tensor = model.head(model.through(model.words(tokens)))
    return outputs


def embedding_alone(model: Turns, tokens: Tensor) -> Tensor:
    outputs: Tensor = model.words(tokens).exp()
    return outputs


def two_in_turns(model: Turns, tokens: Tensor) -> Tensor:
    first, second = model.words(tokens), model.words(tokens.flip(0))
    first, second = model.through(first), model.through(second)
    first, second = model.norm(first), model.norm(second)
    outputs: Tensor = model.head(first) + 2 * model.head(second)
    return outputs


def backward_between(model: Turns, tokens: Tensor) -> Tensor:
    y = model.norm(model.through(model.words(tokens)))
    (slope,) = torch.autograd.grad(
        y.square().sum(), model.places.weight, allow_unused=True, retain_graph=False
    )
    assert slope is None
    return as_planned(model, tokens)


def failing_between(model: Turns, tokens: Tensor) -> Tensor:
    with contextlib.suppress(TypeError):
        model.layers[0](model.words(tokens), "one input more")
    model.words(tokens)
    model.norm(model.places(tokens))
    return as_planned(model, tokens)


def evaluated_between(model: Turns, tokens: Tensor) -> Tensor:
    embedded = model.words(tokens)
    with torch.no_grad():
        as_planned(model, tokens.flip(0))
    outputs: Tensor = model.head(model.norm(model.through(embedded)))
    return outputs


def scaled_between(model: Turns, tokens: Tensor) -> Tensor:
    outputs: Tensor = model.head(model.norm(model.through(model.words(tokens).mul_(2))))
    return outputs


WAYS: dict[str, Callable[[Turns, Tensor], Tensor]] = {
    "": as_planned,
    "two in turns": two_in_turns,
    "without the embedding": without_embedding,
    "the norm alone": norm_alone,
    "the head alone": head_alone,
    "the embedding alone": embedding_alone,
    "backward between": backward_between,
    "failing between": failing_between,
    "evaluated between": evaluated_between,
    "scaled between": scaled_between,
}
WARNS = {"two in turns", "without the embedding"}


def thrifty_plan(make: Callable[[], Model]) -> Plan:
    """Return the plan that keeps nothing of any call but what it must."""
    planner = planner_of(make(), rows(), 0)
    options = [
        each.option(Decision(keep=program.completed(program.pinned, frozenset())))
        for each in planner._callers
        for program in [each.call.program]
    ]
    chosen = [Chosen(start=start, option=each, effect=each.effect) for start, each in enumerate(options)]
    return replace(
        planner.plan(planner.plain_peak_bytes),
        predicted_peak_bytes=planner._peak_bytes(chosen),
        blocks=tuple(block for each in chosen for block in planner._block_plans(each)),
    )


@pytest.mark.parametrize("name", BESIDE)
def test_what_keeps_nothing_is_neutral_and_exact(name: str) -> None:
    examine(BESIDE[name], rows(), thrifty_plan(BESIDE[name]))


def planned_turns() -> Turns:
    plan, model = thrifty_plan(Turns), Turns()
    assert [block.modules for block in plan.blocks] == [("words", "layers.0"), (), ("norm", "head")]
    carrying_out.enclose(plan, BUDGET.blocks_of(model), BUDGET.beside_of(model))
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def are_equal(expected: list[Any], found: list[Any]) -> bool:
    return all(
        b is None if a is None else b is not None and torch.equal(a, b)
        for a, b in zip(expected, found, strict=True)
    )


@pytest.mark.parametrize("way", [way for way in WAYS if way != "scaled between"])
def test_other_orders_of_calls_have_the_gradients_of_the_plain_model(way: str) -> None:
    plain, planned = Turns(), planned_turns()
    for each in ("", way, ""):  # what is left open must not reach the next step
        plain.way = planned.way = each
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert are_equal(gradients(plain, rows()), gradients(planned, rows())), each
        told = {str(each.message) for each in caught}
        assert told == ({OTHER_MODULES} if each and each in WARNS else set())


def test_a_step_in_other_turns_leaves_the_planned_one_as_small_as_it_was() -> None:
    planned, x = planned_turns(), rows()
    peak_bytes = thrifty_plan(Turns).predicted_peak_bytes
    for way in ("", "failing between", ""):
        planned.way = way
        step_of(planned, x)()
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == peak_bytes


def test_what_was_written_since_it_was_made_is_refused() -> None:
    planned = planned_turns()
    planned.way = "scaled between"
    message = "ac: an input of 'layers.0' was written to in place after its plan had seen it made"
    with pytest.raises(StrategyError, match=re.escape(message)):
        gradients(planned, rows())
    planned.way = ""
    assert are_equal(gradients(Turns(), rows()), gradients(planned, rows()))


@pytest.mark.parametrize("size", [1, 2])
def test_smaller_batches_have_the_gradients_of_the_plain_model(size: int) -> None:
    assert are_equal(gradients(Turns(), rows()[:size]), gradients(planned_turns(), rows()[:size]))


def test_more_tokens_and_other_parameters_are_refused() -> None:
    x = rows()
    with pytest.raises(StrategyError, match=r"'layers\.0' was made for input 0 of \(4, 6\), not \(8, 6\)"):
        gradients(planned_turns(), torch.cat([x, x]))
    planned = planned_turns()
    planned.head = nn.Linear(WIDTH, 5)
    gradients(planned, x)  # a head of another's making is none of the plan's
    planned = planned_turns()
    planned.head.weight = nn.Parameter(torch.zeros(5, WIDTH))
    with pytest.raises(StrategyError, match=r"made for parameter head\.weight of \(4, 8\), not \(5, 8\)"):
        gradients(planned, x)


def test_copies_have_regions_of_their_own() -> None:
    planned = planned_turns()
    copied = copy.deepcopy(planned)
    tokens = torch.zeros(4, TOKENS, dtype=torch.int64)
    embedded = planned.words(tokens)
    assert are_equal(gradients(Turns(), rows()), gradients(copied, rows()))
    planned.head(planned.norm(planned.through(embedded))).sum().backward()


def test_a_second_backward_is_refused_in_words() -> None:
    planned = planned_turns()
    loss = planned(rows()).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StrategyError, match="backward runs a second time"):
        loss.backward()


def test_an_earlier_plan_leaves_no_region_that_does_anything() -> None:
    planned, x = planned_turns(), rows()
    plain = planner_of(Turns(), x, 0)
    everything = plain.plan(plain.plain_peak_bytes)
    assert everything.is_plain
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) < plain.plain_peak_bytes
    carrying_out.enclose(everything, BUDGET.blocks_of(planned), BUDGET.beside_of(planned))
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plain.plain_peak_bytes
