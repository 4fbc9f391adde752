"""What users write in blocks and around them: planned bit for bit and byte for byte, or refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from strategies import StrategyError
from strategies.ac.budget import Budget
from strategies.budget.eager import carrying_out
from strategies.budget.eager.first_call import shadow_step
from strategies.budget.plan import Plan
from strategies.budget.planning.known_plans import KnownPlans, WayToPlan
from strategies.step.call_sizes import FIRST_CALL
from strategies.step.plan_capture import capture
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.eager.idioms import (
    BESIDE,
    BETWEEN,
    IN_PLACE,
    ITERATORS,
    MODELS,
    REFUSED,
    ROWS,
    STATES,
    TOKENS,
    WIDE,
    WIDTH,
    WITHOUT_DATA,
    Between,
    Model,
    Parts,
    of,
)
from tests.strategies.budget.small_steps import measured_peak_bytes, step_of

Examine: TypeAlias = Callable[[Callable[[], Model], Tensor], None]
HOST_BYTES = 1 << 30
BUDGET = Budget(fraction=1.0, layers_fqn="layers")
SHAPES = {"two dimensions": (ROWS * TOKENS, WIDTH), "three dimensions": (ROWS, TOKENS, WIDTH)}
ROOM = 0.3
"""Share of the way from the smallest peak to the plain one."""


def rows(shape: tuple[int, ...] = SHAPES["three dimensions"]) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def graph_of(model: nn.Module, x: Tensor) -> StepGraph:
    """Return the second step of a model."""
    step_of(model, x)()
    model.zero_grad()
    standing = [*model.parameters(), *model.buffers(), x]
    return capture(
        step_of(model, x),
        BUDGET.modules_of(model),
        device=torch.device("cpu"),
        standing=standing,
    )


def trained(model: nn.Module, x: Tensor) -> list[Any]:
    """Return what two steps leave: gradients, buffers and the generator's state."""
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(2):
        step_of(model, x)()
        found += [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        found += [each.clone() for each in model.buffers()]
    return [*found, torch.get_rng_state()]


def are_equal(expected: list[Any], found: list[Any]) -> bool:
    pairs = zip(expected, found, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


def enclosed(make: Callable[[], Model], plan: Plan) -> Model:
    """Return a model with a plan around its blocks."""
    planned = make()
    modules = BUDGET.modules_of(planned)
    carrying_out.enclose(plan.with_idle(modules.blocks), modules)
    return planned


def examine(make: Callable[[], Model], x: Tensor, plan: Plan) -> int:
    """Require that a plan is carried out as it says, and return the number of blocks that it changes."""
    planned = enclosed(make, plan)
    assert are_equal(trained(make(), x), trained(planned, x))
    # of one step all operators are noted, and of the next one those alone that must be
    on_host, *peaks = (
        measured_peak_bytes(planned, [x], step_of(planned, x), on_host=each) for each in (True, False, False)
    )
    if peaks[0] < plan.predicted_peak_bytes:  # what a tape holds while it knows no order was its peak
        assert peaks[0] == peaks[1]
        fresh = enclosed(make, plan)
        peaks = [measured_peak_bytes(fresh, [x], step_of(fresh, x))] * 2
    assert (on_host, *peaks) == (plan.offloaded_bytes, *[plan.predicted_peak_bytes] * 2)
    peak = peaks[0]
    assert peak <= plan.budget_bytes
    return sum(not block.plain for block in plan.blocks)


def has_run(make: Callable[[], Model], x: Tensor) -> Model:
    """Return a model after a step, which makes what is made lazily."""
    model = make()
    step_of(model, x)()
    return model


def examine_plans(make: Callable[[], Model], x: Tensor) -> None:
    """Require that the smallest plan, and one with room on the host, are carried out as they say."""
    model = has_run(make, x)
    plain_bytes = measured_peak_bytes(model, [x], step_of(model, x))
    graph, changed = graph_of(make(), x), 0
    for share, host_bytes in ((0.0, 0), (ROOM, HOST_BYTES)):
        way = WayToPlan(
            graph=graph, objective="flops", host_bytes=host_bytes, nests=True, is_taped=True, chunk=None
        )
        plans = KnownPlans([way], "flops")
        found_bytes, smallest = plans.range_bytes()
        assert found_bytes == plain_bytes
        changed += examine(make, x, plans.plan(int(smallest + share * (plain_bytes - smallest))))
    assert changed


def sum_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return the step that a first call plans for."""

    def run() -> None:
        model.zero_grad()
        outputs = model(x)
        outputs.backward(outputs.detach().new_ones(()).expand(outputs.shape))

    return run


def first_call(make: Callable[[], Model], x: Tensor) -> Budget:
    """Return the strategy whose first call plans for little more than the smallest peak."""
    plan = BUDGET.plan(shadow_step(make(), (x,), {}))
    smallest, plain = plan.minimum_feasible_bytes, plan.plain_peak_bytes
    return Budget(fraction=(smallest + ROOM * (plain - smallest)) / plain, layers_fqn="layers")


def examine_first_call(make: Callable[[], Model], x: Tensor) -> None:
    """Require that what a first call plans keeps the budget, and has the gradients of the plain model."""
    budget = first_call(make, x)
    planned = budget.apply(make())
    assert are_equal(trained(make(), x), trained(planned, x))
    plan = budget.observe(planned).plan
    assert plan is not None
    assert measured_peak_bytes(planned, [x], sum_step(planned, x)) <= plan["budget_bytes"]


by_each_way = pytest.mark.parametrize(
    "examine", [examine_plans, examine_first_call], ids=["planned from a step", "at a first call"]
)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("between", IN_PLACE.values(), ids=IN_PLACE)
@by_each_way
def test_in_place_on_what_a_linear_made(examine: Examine, between: Between, shape: tuple[int, ...]) -> None:
    examine(of(between), rows(shape))


@pytest.mark.parametrize(("between", "parts"), BETWEEN.values(), ids=BETWEEN)
@by_each_way
def test_an_idiom_between_linears(examine: Examine, between: Between, parts: Parts) -> None:
    examine(of(between, parts), rows())


@pytest.mark.parametrize("make", [*MODELS.values(), *BESIDE.values()], ids=[*MODELS, *BESIDE])
@by_each_way
def test_an_idiom_around_blocks(examine: Examine, make: Callable[[], Model]) -> None:
    examine(make, rows())


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_no_plan_can_follow_is_refused_by_name(make: Callable[[], Model], words: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(words)):
        examine_plans(make, rows())
    with pytest.raises(StrategyError, match=re.escape(words)):
        examine_first_call(make, rows())


@pytest.mark.parametrize(("make", "words"), WITHOUT_DATA.values(), ids=WITHOUT_DATA)
def test_what_needs_data_is_refused_at_a_first_call_and_planned_from_a_step(
    make: Callable[[], Model], words: str
) -> None:
    with pytest.raises(StrategyError, match=re.escape(words)):
        Budget(fraction=0.95, layers_fqn="layers").apply(make())(rows())
    examine_plans(make, rows())


@pytest.mark.parametrize("made", STATES.values(), ids=STATES)
def test_a_first_call_leaves_the_state_of_python_as_it_was(made: Callable[[], tuple[Any, Between]]) -> None:
    def make() -> Model:
        state, between = made()
        model = of(between)()
        for block in model.layers:
            block.state = state
        return model

    examine_first_call(make, rows())


@pytest.mark.parametrize("is_enclosed", [False, True])
@pytest.mark.parametrize("made", ITERATORS.values(), ids=ITERATORS)
def test_a_first_call_refuses_what_it_would_use_up(made: Callable[[], Any], is_enclosed: bool) -> None:
    model: Any = of(lambda block, h: h / (block.state() if is_enclosed else next(block.state)))()
    for block in model.layers:
        block.state = partial(next, made()) if is_enclosed else made()
    with pytest.raises(StrategyError, match=r"holds the iterator 'state', which .* Budget\.write_plan"):
        Budget(fraction=0.95, layers_fqn="layers").apply(model)(rows())


def in_an_attribute(block: Any, h: Tensor) -> Tensor:
    if block.table is None:
        block.table = (torch.arange(WIDE) / 8).cos()
    result: Tensor = h.exp() * block.table
    return result


def in_a_dictionary(block: Any, h: Tensor) -> Tensor:
    if WIDE not in block.tables:
        block.tables[WIDE] = (torch.arange(WIDE) / 8).cos()
    result: Tensor = h.exp() * block.tables[WIDE]
    return result


def in_a_buffer(block: Any, h: Tensor) -> Tensor:
    if not block.table.numel():
        block.table = (torch.arange(WIDE) / 8).cos()
    result: Tensor = h.exp() * block.table
    return result


def table_of(size: int) -> Tensor:
    return (torch.arange(size) / 8).cos()


cached_table_of = functools.cache(table_of)
HIDDEN = SimpleNamespace(table_of=functools.cache(table_of))
MADE: dict[int, Tensor] = {}


def in_a_global(_: Any, h: Tensor) -> Tensor:
    if WIDE not in MADE:
        MADE[WIDE] = table_of(WIDE)
    return h.exp() * MADE[WIDE]


def in_a_cache(_: Any, h: Tensor) -> Tensor:
    return h.exp() * cached_table_of(WIDE)


def in_a_hidden_cache(_: Any, h: Tensor) -> Tensor:
    result: Tensor = h.exp() * HIDDEN.table_of(WIDE)
    return result


TABLES: dict[str, tuple[Between, Parts]] = {
    "in an attribute": (in_an_attribute, lambda: {"table": None}),
    "in a buffer": (in_a_buffer, lambda: {"table": torch.empty(0)}),
    "in a dictionary": (in_a_dictionary, lambda: {"tables": {}}),
}
"""Functions that make a table in their first call, and keep it."""


@pytest.mark.parametrize(("between", "parts"), TABLES.values(), ids=TABLES)
@by_each_way
def test_a_first_call_may_make_what_later_calls_find(
    examine: Examine, between: Between, parts: Parts
) -> None:
    with pytest.warns(UserWarning, match=re.escape(FIRST_CALL)):
        examine(of(between, parts), rows())


@pytest.mark.parametrize("between", [in_a_cache, in_a_global])
def test_a_first_call_leaves_no_tensor_without_memory_outside_of_the_model(between: Between) -> None:
    cached_table_of.cache_clear()
    MADE.clear()
    planned = Budget(fraction=0.9, layers_fqn="layers").apply(of(between)())
    with pytest.warns(UserWarning, match=re.escape(FIRST_CALL)):
        planned(rows())
    assert type(cached_table_of(WIDE)) is type(MADE.get(WIDE, rows())) is Tensor
    assert are_equal(trained(of(between)(), rows()), trained(planned, rows()))


def test_refusal_of_a_cache_that_has_kept_results_before() -> None:
    cached_table_of.cache_clear()
    cached_table_of(WIDE + 1)
    planned = Budget(fraction=0.9, layers_fqn="layers").apply(of(in_a_cache)())
    with pytest.raises(StrategyError, match="cache kept results of table_of, and keeps others of tensors"):
        planned(rows())
    assert not cached_table_of.cache_info().currsize
    trained(of(in_a_cache)(), rows())
    planned(rows())
    assert type(cached_table_of(WIDE)) is Tensor


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch takes tensors for those without memory
def test_refusal_of_a_cache_that_nobody_finds() -> None:
    HIDDEN.table_of.cache_clear()
    planned = Budget(fraction=0.9, layers_fqn="layers").apply(of(in_a_hidden_cache)())
    with pytest.raises(StrategyError) as error:
        planned(rows())
    HIDDEN.table_of.cache_clear()
    assert str(error.value) == (
        "ac: the first call plans on tensors without memory, and the model has kept one where nobody finds "
        "it; keep it as an attribute of a module, or write a plan of a step by Budget.write_plan and give it "
        "as ac.plan_file, as trials do"
    )
