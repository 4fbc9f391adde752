"""A later call of a block follows the order of an earlier one, and leaves it where forward is another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


def test_noise_that_autograd_saves_is_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(u: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(u + torch.randn(u.shape) * v.mean())

    made = planned(Changing(Now(noisy)), X, 0.9)
    found = []
    for _ in range(3):
        with ends(monkeypatch) as in_order:
            found.append(peak_bytes(made, X))
    assert set(in_order) == {True}
    assert len(set(found)) == 1


def untouched(_value: Tensor) -> None:
    pass


def doubled(value: Tensor) -> None:
    value.mul_(2.0)


def doubled_through_data(value: Tensor) -> None:
    value.data.mul_(2.0)


def that_writes(write: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def between(u: Tensor, v: Tensor) -> Tensor:
        read_later, grown = u * 3.0, torch.exp(v * 0.1)
        write(read_later)
        return torch.exp(grown * 0.1) * torch.sin(u * 2.0) + torch.sin(read_later)

    return between


@pytest.mark.parametrize("share", [MIDDLE, 0.75, 0.9])
@pytest.mark.parametrize("write", [doubled, torch.no_grad()(doubled), doubled_through_data])
def test_a_write_that_no_earlier_call_had_is_refused(write: Callable[[Tensor], object], share: float) -> None:
    """Who looks at fewer operators in later calls would make what the write has changed as it was before."""
    now = Now(that_writes(untouched))
    plain = Changing(now)
    made = planned(plain, X, share)
    for block in made.blocks.values():
        cast("Block", block).now = now
    for _ in range(2):
        require_neutral(plain, made, X)
    now.between = that_writes(write)
    with pytest.raises(StrategyError, match="is not as it was planned"):
        gradients(made, X)
    now.between = that_writes(untouched)
    require_neutral(plain, made, X)


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
