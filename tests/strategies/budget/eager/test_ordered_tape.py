"""A later call of a block follows the order of an earlier one, and leaves it where forward is another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from strategies.ac.budget import Budget
from strategies.base import StrategyError
from strategies.budget.eager.carrying_out import enclose
from strategies.budget.plan import Plan
from strategies.budget.planning.planner import Planner
from strategies.regions.blocks import ModelModules
from strategies.step.operator_order import KnownOrders, OperatorOrder
from strategies.step.ordered_mode import OrderedMode
from strategies.step.plan_capture import capture
from tests.rank_pool import RankPool
from tests.strategies.budget.planning.grouping_by_hand import grouped
from tests.strategies.budget.small_steps import WIDTH, Gated, WithBlocks, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured

M = TypeVar("M", bound=nn.Module)
ROWS = 64
BUDGET = Budget(fraction=1.0, layers_fqn="layers")
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.randn(ROWS // 8, 8, WIDTH, generator=torch.Generator().manual_seed(0))


def gate(u: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(u) * torch.tanh(v)


@dataclass
class Now:
    """The forward that blocks have now."""

    between: Callable[[Tensor, Tensor], Tensor] = gate


class Block(nn.Module):
    """Two linears that a gate joins."""

    def __init__(self, now: Now) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.now = now

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(x), self.b(x)
        h = self.now.between(u, v)
        outputs: Tensor = x + self.c(functional.silu(h) * u)
        return outputs


class Changing(WithBlocks):
    """Blocks whose forward changes."""

    def __init__(self, now: Now) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(now) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def plan_of(model: nn.Module, x: Tensor, share: float) -> Plan:
    """Return a plan between the model's smallest peak and the plain one."""
    step_of(model, x)()
    standing = [*model.parameters(), *model.buffers(), x]
    graph = capture(
        step_of(model, x), BUDGET.modules_of(model), device=torch.device("cpu"), standing=standing
    )
    planner = Planner(graph)
    low, high = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    return planner.plan(int(low + share * (high - low)))


def planned(model: M, x: Tensor, share: float) -> M:
    """Return a copy of the model with such a plan."""
    plan, made = plan_of(model, x, share), copy.deepcopy(model)
    enclose(plan, BUDGET.modules_of(made))
    return made


@contextmanager
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Note of each call inside the scope that ends whether it was in an order."""
    found: list[bool] = []
    end = KnownOrders.end

    def noted(self: KnownOrders, order: OperatorOrder | None, *, is_in_order: bool) -> None:
        found.append(is_in_order)
        end(self, order, is_in_order=is_in_order)

    with monkeypatch.context() as patch:
        patch.setattr(KnownOrders, "end", noted)
        yield found


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(1)
    step_of(model, x)()
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def require_neutral(plain: nn.Module, made: nn.Module, x: Tensor) -> None:
    for one, other in zip(gradients(plain, x), gradients(made, x), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    return measured_peak_bytes(model, [x], step_of(model, x))


def more_views(u: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(u.view(2, -1)).view(u.shape) * torch.tanh(v)


MIDDLE = 0.5
FORWARDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool, int]] = {
    "the same": (gate, True, 0),
    "values that nobody has passed": (lambda u, _: torch.sigmoid(u) * torch.tanh(u), True, 0),
    "values that were passed": (lambda u, v: torch.sigmoid(v) * torch.tanh(u), False, 2 * ROWS * WIDTH * 4),
    "other views": (more_views, False, 0),
    "a value from outside": (lambda u, _: torch.sigmoid(u) * torch.tanh(Y.view(ROWS, WIDTH)), False, 0),
}
"""Forwards, whether they stay in the order of `gate`, and bytes that the first call holds beyond its plan."""


@pytest.mark.parametrize(("between", "stays", "more"), FORWARDS.values(), ids=FORWARDS.keys())
def test_a_forward_is_followed_in_full_from_the_call_on_that_leaves_the_order(
    between: Callable[[Tensor, Tensor], Tensor], stays: bool, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Now()
    plain = Changing(now)
    made, followed = planned(plain, X, MIDDLE), planned(plain, X, MIDDLE)
    for block in (*made.blocks.values(), *followed.blocks.values()):
        cast("Block", block).now = now
    found: list[tuple[set[bool], int]] = []
    for known in (gate, gate, between, between, gate):
        now.between = known
        with ends(monkeypatch) as in_order:
            peak = peak_bytes(made, X)
        with monkeypatch.context() as patch:
            patch.setattr(KnownOrders, "begin", lambda *_: False)
            found.append((set(in_order), peak - peak_bytes(followed, X)))
        require_neutral(plain, made, X)
    assert found == [({False}, 0), ({True}, 0), ({stays}, more), ({stays}, 0), ({stays}, 0)]


def test_parameters_without_gradients_have_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Now()
    plain = Changing(now)
    made = planned(plain, X, MIDDLE)
    found = []
    for is_frozen in (False, False, True, True, False):
        for model in (plain, made):
            model.get_parameter("layers.1.a.weight").requires_grad_(not is_frozen)
        with ends(monkeypatch) as in_order:
            require_neutral(plain, made, X)
        found.append(in_order)
    assert found == [[False, False], [True, True], [True, False], [True, True], [True, False]]


def seen_operators(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many operators tapes see in a step that follows orders."""
    seen = 0
    follow = OrderedMode._follow_order

    def counted(self: OrderedMode, order: OperatorOrder) -> None:
        follow(self, order)
        dispatch = vars(self)["__torch_dispatch__"].__func__

        def count(self: OrderedMode, *args: object) -> object:
            nonlocal seen
            seen += 1
            return dispatch(self, *args)

        vars(self)["__torch_dispatch__"] = MethodType(count, self)

    with monkeypatch.context() as patch:
        patch.setattr(OrderedMode, "_follow_order", counted)
        step_of(model, x)()
    return seen


SEEN = {0.0: 20, MIDDLE: 18, 0.75: 10}
"""Operators that tapes see of the 24 of two blocks, by the share of the plan."""


@pytest.mark.parametrize(("share", "count"), SEEN.items())
def test_a_tape_sleeps_where_no_operator_is_noted(
    share: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Changing(Now())
    made = planned(plain, X, share)
    for _ in range(2):
        require_neutral(plain, made, X)
    assert seen_operators(made, X, monkeypatch) == count


def unseen(write: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `gate` with a write of which autograd makes no node."""

    def between(u: Tensor, v: Tensor) -> Tensor:
        h = gate(u, v)
        with torch.no_grad():
            write(u, v, h)
        return h

    return between


REFUSALS = ("in place", "is not as it was planned")
WRITES = {
    "the result": unseen(lambda _u, _v, h: h.add_(1.0)),
    "what is read again": unseen(lambda u, _v, _h: u.mul_(2.0)),
    "what is not read again": unseen(lambda _u, v, _h: v.mul_(2.0)),
    "parts": unseen(lambda u, _v, h: (u[:, 0].zero_(), h[0].zero_())),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("share", SEEN)
def test_a_write_that_the_order_has_not_is_refused_or_found(
    write: Callable[[Tensor, Tensor], Tensor], share: float
) -> None:
    now = Now()
    plain = Changing(now)
    made = planned(plain, X, share)
    for block in made.blocks.values():
        cast("Block", block).now = now
    for between in (gate, gate, write, write):
        now.between = between
        problem = refusal(plain, made)
        assert not problem or (between is write and any(each in problem for each in REFUSALS))


def refusal(plain: nn.Module, made: nn.Module) -> str:
    """Return why a step is refused; nothing where it is that of the plain model, bit for bit."""
    try:
        require_neutral(plain, made, X)
    except StrategyError as error:
        return str(error)
    return ""


class Compiled(nn.Module):
    """A block that calls compiled code, which leaves the compiler in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.b(_in_two_graphs(self.a(x)).sigmoid())
        return outputs


@torch.compile(backend="eager")
def _in_two_graphs(x: Tensor) -> Tensor:
    y = x.tanh()
    torch._dynamo.graph_break()
    return y.exp() * y


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks a tensor that is no leaf
def test_compiled_code_inside_is_followed_with_its_graph_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Changing(Now())
    plain.layers = nn.ModuleList(Compiled() for _ in range(2))
    made = planned(plain, X, 0.0)
    for in_order in (False, True, True):
        with ends(monkeypatch) as found:
            require_neutral(plain, made, X)
        assert set(found) == {in_order}  # a plan may follow both blocks by one tape


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda v: torch.where(v > 0, v, torch.tensor(0.1)),
    "places": lambda v: v[torch.tensor([0]).expand(ROWS)] * v,
    "a number that is written to": lambda v: v * torch.tensor([0.5]).add_(1),
}
"""Functions that make tensors of numbers of Python, which other operators read."""


@pytest.mark.parametrize("function", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_constants_that_a_block_makes_keep_the_order(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Changing(Now(lambda u, v: torch.sigmoid(u) * function(v)))
    made = planned(plain, X, 0.0)
    for in_order in (False, True, True):
        with ends(monkeypatch) as found:
            require_neutral(plain, made, X)
        assert set(found) == {in_order}


@pytest.mark.parametrize("is_group", [False, True], ids=["blocks alone", "a group"])
def test_dropout_keeps_the_order_and_the_bytes(is_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Gated(0.1, 4 if is_group else 2)
    if is_group:
        made, plan = Gated(0.1), grouped(captured(Gated(0.1), Y), [(0, 3)], 0.2)
        enclose(plan, ModelModules(blocks=made.blocks))
    else:
        made = planned(plain, Y, 0.0)
    peaks = []
    for in_order in (False, True, True):
        require_neutral(plain, made, Y)
        with ends(monkeypatch) as found:
            peaks.append(peak_bytes(made, Y))
        assert set(found) == {in_order}
    assert len(set(peaks)) == 1
    assert not is_group or peaks[0] == plan.predicted_peak_bytes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_no_orders(
    copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Gated(blocks=2)
    made = planned(plain, Y, 0.0)
    for model in (made, made, copied(made)):
        with ends(monkeypatch) as found:
            require_neutral(plain, model, Y)
    assert set(found) == {False}


def sharded_steps(rank: int, plan: Plan) -> list[set[bool]]:
    """Return of each step whether calls were in order; gradients are those of the plain model."""
    x = torch.randn(Y.shape, generator=torch.Generator().manual_seed(rank))
    whole, plain = Gated(0.1, 2), Gated(0.1, 2)
    enclose(plan, BUDGET.modules_of(whole))
    for model in (plain, whole):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    found = []
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch, ends(patch) as in_order:
            for model in (plain, whole):
                torch.manual_seed(rank)
                step_of(model, x)()
        found.append(set(in_order))
        pairs = zip(plain.parameters(), whole.parameters(), strict=True)
        for one, other in pairs:
            mine, theirs = (cast("DTensor", each.grad) for each in (one, other))
            assert torch.equal(mine.to_local(), theirs.to_local())
    return found


def test_sharded_blocks_keep_their_order(pool2: RankPool) -> None:
    plan = plan_of(Gated(0.1, 2), Y, 0.0)  # not in each rank
    assert not plan.is_plain
    assert pool2.run(sharded_steps, plan) == [[{False}, {True}, {True}]] * 2
