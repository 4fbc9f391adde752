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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strategies import StrategyError
from strategies.budget.eager import carrying_out
from strategies.budget.plan import Plan
from strategies.budget.planning.block_program import BlockProgram
from strategies.budget.planning.planner import Chosen, Planner
from strategies.budget.planning.simulation import Decision
from strategies.step.call_sizes import OTHERS_BEFORE
from tests.strategies.budget.eager.idioms import (
    BESIDE,
    ROWS,
    TOKENS,
    WIDTH,
    FirstInput,
    Model,
    Plain,
    Shifted,
    Teacher,
    Whole,
    Worded,
)
from tests.strategies.budget.eager.test_idioms import BUDGET, examine, graph_of, rows
from tests.strategies.budget.small_steps import measured_peak_bytes, step_of

HEADED = ["norm", "head"]
TAILS = {"a head that is the embedding": ["norm"], "outputs of the embedding": ["norm"]}
"""Modules behind the blocks that are one call, where it is not norm and head."""


@pytest.mark.parametrize("name", BESIDE)
def test_what_runs_beside_the_blocks_is_part_of_a_call(name: str) -> None:
    graph = graph_of(BESIDE[name](), rows())
    first, second, tail = graph.calls
    assert (first.caller, second.caller, tail.caller) == ("", None, None)
    assert (first.modules, second.modules, tail.modules) == ([], [], TAILS.get(name, HEADED))
    for call in graph.calls:
        operators = [graph.operators[index] for index in call.operators]
        assert [each.ordinal for each in operators] == list(range(len(operators)))
        own = operators[len(call.before) :]
        assert own[0].name == ("aten.addmm.default" if call.fqn.startswith("layers") else own[0].name)
    before = [graph.operators[index].name for index in first.operators[: len(first.before)]]
    assert [each.signature.partition("(")[0] for each in first.before] == before


class Checkpointing(Plain):
    """Has a checkpoint of its own around what comes before the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.through(checkpoint(self.inner, x, use_reentrant=False)))
        return outputs


class ReadsBetween(Plain):
    """Reads what the first block is made of after it."""

    def through(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        outputs: Tensor = self.layers[1](first + x)
        return outputs


AROUND: dict[str, Callable[[], Model]] = {
    **BESIDE,
    "a teacher": Teacher,
    "a checkpoint before the blocks": Checkpointing,
    "read between blocks": ReadsBetween,
}


@pytest.mark.parametrize("make", [FirstInput, Shifted], ids=["read by others", "written by others"])
def test_what_others_read_or_write_stays_outside_of_the_first_block(make: Callable[[], Model]) -> None:
    assert graph_of(make(), rows()).calls[0].caller is None


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


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_a_mode(model: Turns, tokens: Tensor) -> Tensor:
    embedded = model.words(tokens)
    with Passing():
        x = model.through(embedded)
    outputs: Tensor = model.head(model.norm(x))
    return outputs


def scaled_norm(model: Turns, tokens: Tensor) -> Tensor:
    outputs: Tensor = model.head(model.norm(model.through(model.words(tokens))).mul_(2))
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
    "a mode around the blocks": in_a_mode,
    "a norm scaled": scaled_norm,
}
WARNS = {
    "two in turns",
    "backward between",
    "failing between",
    "scaled between",
    "a mode around the blocks",
}


def least(program: BlockProgram) -> Decision:
    """Return the decision that keeps nothing but what it must."""
    return Decision(keep=program.completed(program.pinned))


def thrifty_plan(make: Callable[[], Model], *decisions: Decision) -> Plan:
    """Return the plan that keeps nothing of any call but what it must, but for decisions about the first."""
    planner = Planner(graph_of(make(), rows()))
    decided = [*decisions, *(least(each.call.program) for each in planner._callers[len(decisions) :])]
    options = [each.option(decision) for each, decision in zip(planner._callers, decided, strict=True)]
    chosen = [Chosen(start=start, option=each, effect=each.effect) for start, each in enumerate(options)]
    peak_bytes = planner._peak_bytes(chosen)
    return replace(
        planner.plan(planner.plain_peak_bytes),
        budget_bytes=max(peak_bytes, planner.plain_peak_bytes),
        predicted_peak_bytes=peak_bytes,
        blocks=tuple(block for each in chosen for block in planner._block_plans(each)),
    )


@pytest.mark.parametrize("make", AROUND.values(), ids=AROUND)
def test_what_keeps_nothing_is_neutral_and_exact(make: Callable[[], Model]) -> None:
    plan = thrifty_plan(make)
    assert plan.blocks[0].caller is not None
    examine(make, rows(), plan)


class SavesBefore(Model):
    """Hands a value on to its blocks that autograd has saved before them."""

    def __init__(self) -> None:
        super().__init__(lambda: Whole(lambda _, h: h.repeat(4, 1, 1).sin().exp()[:ROWS] * h.cos()), blocks=1)

    def through(self, x: Tensor) -> Tensor:
        return super().through((x * 2).exp())


@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2)])
def test_a_drop_frees_no_value_that_others_have(numbers: tuple[int, ...]) -> None:
    call = Planner(graph_of(SavesBefore(), rows()))._callers[0].call
    (value,) = (each for each in call.program.saved if call.deaths[each] > max(call.asked))
    drops = frozenset((value, number) for number in numbers)
    keep = call.program.completed(frozenset({value}))
    examine(SavesBefore, rows(), thrifty_plan(SavesBefore, Decision(keep=keep, drops=drops)))


def planned_turns() -> Turns:
    plan, model = thrifty_plan(Turns), Turns()
    assert [block.caller for block in plan.blocks] == ["", None, None]
    assert [block.modules for block in plan.blocks] == [(), (), ("norm", "head")]
    carrying_out.enclose(plan, BUDGET.modules_of(model))
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


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a norm scaled"])
def test_other_orders_of_calls_have_the_gradients_of_the_plain_model(way: str) -> None:
    plain, planned = Turns(), planned_turns()
    for each in ("", way, ""):  # what is left open must not reach the next step
        plain.way = planned.way = each
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert are_equal(gradients(plain, rows()), gradients(planned, rows())), each
        told = {str(each.message) for each in caught}
        assert told == ({OTHERS_BEFORE} if each and each in WARNS else set())


@pytest.mark.filterwarnings("ignore:ac=budget. before the first block")
def test_a_step_in_other_turns_leaves_the_planned_one_as_small_as_it_was() -> None:
    planned, x = planned_turns(), rows()
    peak_bytes = thrifty_plan(Turns).predicted_peak_bytes
    for way in ("", "failing between", ""):
        planned.way = way
        step_of(planned, x)()
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == peak_bytes


def test_what_was_written_since_it_was_made_is_refused() -> None:
    planned = planned_turns()
    planned.way = "a norm scaled"
    message = "ac: an input of 'norm' was written to in place after its plan had seen it made"
    with pytest.raises(StrategyError, match=re.escape(message)):
        gradients(planned, rows())
    planned.way = ""
    assert are_equal(gradients(Turns(), rows()), gradients(planned, rows()))


def test_a_call_that_leaves_out_a_module_has_the_gradients_of_the_plain_model() -> None:
    def make() -> Worded:
        return Worded(end=lambda model, x: model.head(model.middle(model.norm(x))))

    plan, planned, plain = thrifty_plan(make), make(), make()
    tail = plan.blocks[-1]
    assert tail.modules == ("norm", "middle", "head")
    tail = replace(tail, keep=tail.recompute[:2], recompute=tail.recompute[2:])  # what the norm saves
    carrying_out.enclose(replace(plan, blocks=(*plan.blocks[:-1], tail)), BUDGET.modules_of(planned))
    begin, _ = plain.__dict__["ends"]
    for each in (planned, plain):
        each.__dict__["ends"] = begin, lambda model, x: model.head(model.norm(x))
    assert are_equal(gradients(plain, rows()), gradients(planned, rows()))


@pytest.mark.parametrize("size", [1, 2])
def test_smaller_batches_have_the_gradients_of_the_plain_model(size: int) -> None:
    assert are_equal(gradients(Turns(), rows()[:size]), gradients(planned_turns(), rows()[:size]))


def test_more_tokens_and_other_parameters_are_refused() -> None:
    x = rows()
    with pytest.raises(
        StrategyError, match=r"'layers\.0' was made for input 0 of \(4, 6, 8\), not \(8, 6, 8\)"
    ):
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
    loss = planned(rows()).square().sum()
    assert are_equal(gradients(Turns(), rows()), gradients(copied, rows()))
    loss.backward()
    assert are_equal(gradients(Turns(), rows()), gradients(planned, rows()))


def test_a_second_backward_is_refused_in_words() -> None:
    planned = planned_turns()
    loss = planned(rows()).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StrategyError, match="backward runs a second time"):
        loss.backward()


def test_an_earlier_plan_leaves_no_region_that_does_anything() -> None:
    planned, x = planned_turns(), rows()
    plain = Planner(graph_of(Turns(), x))
    everything = plain.plan(plain.plain_peak_bytes)
    assert everything.is_plain
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) < plain.plain_peak_bytes
    carrying_out.enclose(everything, BUDGET.modules_of(planned))
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plain.plain_peak_bytes


@pytest.mark.filterwarnings("ignore:ac=budget. before the first block", "ignore:`torch.jit")
def test_forward_mode_of_torch_func_is_refused_in_words() -> None:
    planned, x = planned_turns(), rows()
    parameters = {name: each.detach() for name, each in planned.named_parameters()}

    def outputs(values: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(planned, values, (x,))

    with pytest.raises(StrategyError, match=r"'layers\.0' is not as it was planned"):
        torch.func.jvp(outputs, (parameters,), (parameters,))
    assert are_equal(gradients(Turns(), x), gradients(planned, x))


class Centred(nn.Module):
    """A norm that subtracts a buffer, which its model writes to behind it."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return ((x.tanh() - self.centre) * self.weight).sin().exp()


def centred(moves: list[bool]) -> Worded:
    """Return a model that writes to the buffer of its norm, once that has run, as `moves` says now."""

    def end(model: Any, x: Tensor) -> Tensor:
        h = model.norm(x)
        if moves[0]:
            model.norm.centre.add_(h.detach().mean((0, 1)))
        outputs: Tensor = model.head(h)
        return outputs

    model = Worded(end=end)
    model.norm = Centred()
    return model


def test_what_is_written_behind_the_norm_that_read_it_is_not_planned() -> None:
    tail = thrifty_plan(lambda: centred([True])).blocks[-1]
    assert "norm" not in tail.modules or not tail.recompute
    examine(lambda: centred([True]), rows(), thrifty_plan(lambda: centred([True])))


def test_what_is_written_behind_the_norm_since_it_was_planned_is_refused() -> None:
    moves = [False]
    planned = centred(moves)
    plan = thrifty_plan(lambda: centred([False]))
    assert plan.blocks[-1].recompute
    carrying_out.enclose(plan, BUDGET.modules_of(planned))
    gradients(planned, rows())
    moves[0] = True
    with pytest.raises(StrategyError, match="what a module of 'norm' has read was written to in place"):
        gradients(planned, rows())
