"""Values that a node reads once: gone in what it runs behind that; all other nodes get values at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from strategies.budget.plan import BlockPlan
from strategies.budget.planning.planner import Planner
from strategies.step.late_value import JustSaved, KeptTicket, LateValue, are_large, factors_of, given
from strategies.step.memory_layout import MemoryLayout
from strategies.step.operator_mode import OperatorMode
from tests.strategies.budget.eager.idioms import BETWEEN, TOKENS, WIDTH, of
from tests.strategies.budget.planning.planning_by_hand import enclose
from tests.strategies.step.test_plan_capture import captured_with

MUL = torch.ops.aten.mul.Tensor


class Tickets:
    """Hooks that hold a copy of each saved tensor on disk, so to say, and note when it is there again."""

    def __init__(self) -> None:
        self.asked = 0
        self.redeemed: list[StorageWeakRef] = []
        self.most = 0

    def pack(self, saved: Tensor) -> Callable[[], Tensor]:
        numbers, layout = saved.detach().tolist(), MemoryLayout.of(saved, saved.detach())
        number = saved.dtype

        def redeem() -> Tensor:
            value = torch.tensor(numbers, dtype=number)
            self.redeemed.append(StorageWeakRef(value.untyped_storage()))
            self.most = max(self.most, sum(not each.expired() for each in self.redeemed))
            return value

        return lambda: self.unpacked(given(redeem, layout, saved.device))

    def unpacked(self, value: Tensor) -> Tensor:
        self.asked += isinstance(value, LateValue)
        return value


def gradients(
    of: Callable[[Tensor, Tensor], Tensor], tickets: Tickets | None, *, create_graph: bool = False
) -> list[Tensor]:
    """Return the gradients of two leaves."""
    torch.manual_seed(0)
    a, b = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    if tickets is None:
        outputs = of(a, b)
    else:
        with saved_tensors_hooks(tickets.pack, lambda redeem: redeem()):
            outputs = of(a, b)
    return list(torch.autograd.grad(outputs.sum(), (a, b), create_graph=create_graph, allow_unused=True))


def attention(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])


NODES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "a product": (torch.mul, 2, 1),
    "a product of one": (lambda a, b: a * a + b, 2, 1),
    "a product that broadcasts": (lambda a, b: a[:1] * b[:, :1], 2, 1),
    "a product with what nobody differentiates": (lambda a, b: a * b.detach() + b, 1, 1),
    "a product of two dtypes": (lambda a, b: a.double() * b, 2, 1),
    "a power": (lambda a, b: a.pow(3) + b, 1, 1),
    "a sine of a cosine": (lambda a, b: a.cos().sin() + b, 2, 1),
    "a quotient": (lambda a, b: a / b, 2, 2),
    "a product of matrices": (torch.mm, 2, 2),
    "attention": (attention, 5, 5),
}


@pytest.mark.parametrize(("of", "late", "most"), NODES.values(), ids=NODES)
def test_every_node_gets_its_values_and_a_product_one_after_the_other(
    of: Callable[[Tensor, Tensor], Tensor], late: int, most: int
) -> None:
    tickets = Tickets()
    found = gradients(of, tickets)
    assert all(map(torch.equal, found, gradients(of, None)))
    assert (tickets.asked, tickets.most) == (late, most)
    assert all(each.expired() for each in tickets.redeemed)


def test_a_factor_that_nobody_needs_is_not_redeemed() -> None:
    tickets = Tickets()
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    with saved_tensors_hooks(tickets.pack, lambda redeem: redeem()):
        outputs = a * b
    assert torch.equal(torch.autograd.grad(outputs.sum(), a)[0], b)
    assert (tickets.asked, len(tickets.redeemed)) == (2, 1)


def test_complex_numbers_are_conjugated() -> None:
    tickets = Tickets()
    a, b = (torch.randn(3, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    with saved_tensors_hooks(tickets.pack, lambda redeem: redeem()):
        outputs = a * b
    found = torch.autograd.grad(outputs.abs().sum(), (a, b))
    expected = torch.autograd.grad((a * b).abs().sum(), (a, b))
    assert all(map(torch.equal, found, expected))
    assert tickets.asked == 2


def test_gradients_of_gradients_get_values_at_once() -> None:
    tickets = Tickets()
    found = gradients(torch.mul, tickets, create_graph=True)
    assert all(map(torch.equal, found, gradients(torch.mul, None)))
    assert tickets.asked == 0


SIZES: dict[str, tuple[list[tuple[int, ...]], bool]] = {
    "two alike": ([(4, 8), (4, 8)], True),
    "one four times as large": ([(4, 8), (8,)], True),
    "one five times as large": ([(5, 8), (8,)], False),
    "one alone": ([(4, 8)], True),
    "none": ([], False),
}


@pytest.mark.parametrize(("sizes", "expected"), SIZES.values(), ids=SIZES)
def test_large_factors_are_read_late(sizes: list[tuple[int, ...]], expected: bool) -> None:
    tensors = [torch.empty(size) for size in sizes]
    assert are_large([MemoryLayout.of(each, each) for each in tensors]) is expected


def test_factors_are_those_that_a_product_saves() -> None:
    leaf, other, constant = (
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True),
        torch.ones(2),
    )
    assert factors_of(MUL, (leaf, other)) == [leaf, other]
    assert not factors_of(MUL, (leaf, constant))
    assert not factors_of(MUL, (leaf, 2.0))
    assert factors_of(torch.ops.aten.pow.Tensor_Scalar, (leaf, 3)) == [leaf]
    assert not factors_of(torch.ops.aten.pow.Tensor_Scalar, (constant, 3))
    assert not factors_of(torch.ops.aten.div.Tensor, (leaf, other))
    with torch.no_grad():
        assert not factors_of(MUL, (leaf, other))


def late_value(redeem: Callable[[], Tensor], like: Tensor) -> Tensor:
    with torch.no_grad():
        late = given(redeem, MemoryLayout.of(like, like), like.device)
    assert isinstance(late, LateValue)
    return late


def test_it_looks_like_the_value() -> None:
    value = torch.randn(3, 5).t()
    late = late_value(lambda: value, value)
    assert (late.shape, late.stride(), late.dtype) == (value.shape, value.stride(), value.dtype)


def test_operators_other_than_a_product_share_one_value() -> None:
    redeemed: list[Tensor] = []

    def redeem() -> Tensor:
        redeemed.append(torch.arange(6.0).view(2, 3))
        return redeemed[-1]

    late = late_value(redeem, torch.zeros(2, 3))
    assert torch.equal(torch.cat([late, late.detach()]), torch.arange(6.0).view(2, 3).repeat(2, 1))
    assert torch.equal(late @ late.t(), redeemed[0] @ redeemed[0].t())
    assert len(redeemed) == 1


class Seen(OperatorMode):
    """Lists operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs)


def test_meters_see_what_runs_to_make_a_value() -> None:
    square = torch.randn(8, 8)
    late = late_value(lambda: torch.ops.aten.mm.default(square, square), square)
    with Seen() as seen:
        product = late * square
    assert torch.equal(product, (square @ square) * square)
    assert seen.names == ["aten.mm.default", "aten.mul.Tensor"]


class Living(OperatorMode):
    """Notes how many redeemed values live when an operator begins."""

    def __init__(self, tickets: Tickets) -> None:
        super().__init__()
        self._tickets = tickets
        self.counts: list[tuple[str, int]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        living = sum(not each.expired() for each in self._tickets.redeemed)
        self.counts.append((func.overloadpacket.__name__, living))
        return func(*args, **kwargs)


ONE_BY_ONE: dict[str, tuple[Callable[[Tensor], Tensor], list[tuple[str, int]]]] = {
    "a power": (lambda x: x.pow(3), [("pow", 1), ("mul", 0), ("mul", 0)]),
    "a sine": (torch.sin, [("cos", 1), ("mul", 0)]),
    "a cosine": (torch.cos, [("sin", 1), ("neg", 0), ("mul", 0)]),
}


@pytest.mark.parametrize(("of", "living"), ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_what_a_node_reads_once_is_gone_in_its_next_operator(
    of: Callable[[Tensor], Tensor], living: list[tuple[str, int]]
) -> None:
    tickets = Tickets()
    x = torch.randn(8, 8, requires_grad=True)
    with saved_tensors_hooks(tickets.pack, lambda redeem: redeem()):
        outputs = of(x)
    with Living(tickets) as seen:
        outputs.backward(torch.ones_like(outputs))
    of_node = dict(living)  # what makes the value again runs, too
    assert [each for each in seen.counts if each[0] in of_node] == living


def test_a_mode_of_others_sees_what_runs_to_make_a_value() -> None:
    tickets = Tickets()
    with FlopCounterMode(display=False):
        found = gradients(torch.mul, tickets)
    assert all(map(torch.equal, found, gradients(torch.mul, None)))
    assert tickets.asked == 0


class OfForward(Seen):
    """Counts operators of a forward."""

    is_of_forward = True


def test_a_gradient_that_a_forward_takes_gets_values_at_once() -> None:
    tickets = Tickets()
    with OfForward():
        found = gradients(torch.mul, tickets)
    assert all(map(torch.equal, found, gradients(torch.mul, None)))
    assert tickets.asked == 0


def units_by_powers(_: nn.Module, h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h.pow(3))))


READ_ONCE: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], dict[str, nn.Module]]]] = {
    "a gated product": BETWEEN["a gated product"],
    "units by powers": (units_by_powers, dict),
}


def smallest_peak_bytes(name: str) -> int:
    """Return the smallest peak that a plan for blocks of `READ_ONCE` reaches."""
    between, parts = READ_ONCE[name]
    model = of(between, parts)()
    x = torch.randn(64, TOKENS, WIDTH)
    blocks = {f"layers.{number}": block for number, block in enumerate(model.layers)}
    return Planner(captured_with(model, blocks, x)).minimum_feasible_bytes


@pytest.mark.parametrize("name", READ_ONCE)
def test_a_block_reaches_a_smaller_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = smallest_peak_bytes(name)
    monkeypatch.setattr("strategies.step.late_value.are_large", lambda saved: False)  # noqa: ARG005
    assert smallest < smallest_peak_bytes(name)


class Gated(nn.Module):
    """One product of large factors."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() * x.tanh()


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real tensors", "fake ones"])
def test_a_tape_lets_both_factors_be_read_late(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[MemoryLayout] = []

    def noted(redeem: Callable[[], Tensor], layout: MemoryLayout, device: torch.device) -> Tensor:
        late.append(layout)
        return given(redeem, layout, device)

    monkeypatch.setattr("strategies.budget.eager.slice_ticket.given", noted)
    block = Gated()
    enclose(block, BlockPlan(fqn="gated"))
    with mode():
        block(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert [each.size for each in late] == [(4, 8), (4, 8)]


def test_nobody_is_held_by_hooks_of_what_was_just_saved() -> None:
    class Owner:
        def __init__(self) -> None:
            self.saved = JustSaved(Tensor.data_ptr)

        def pack(self, tensor: Tensor) -> Tensor:
            self.saved.add(KeptTicket(tensor), tensor.data_ptr())
            return tensor

    gc.disable()
    try:
        owner = Owner()
        with saved_tensors_hooks(owner.pack, lambda packed: packed):
            torch.randn(2, requires_grad=True).sin()
        assert owner.saved.values
        owner.saved.clear()
        found = weakref.ref(owner)
        del owner
        assert found() is None
    finally:
        gc.enable()


class Spoils(torch.autograd.Function):
    """Writes to what it has saved, before it asks for it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        product: Tensor = gradient * ctx.saved_tensors[0].mul_(2)
        product += ctx.saved_tensors[0]
        return product


@pytest.mark.parametrize("hooks", [nullcontext, lambda: saved_tensors_hooks(KeptTicket, lambda each: each())])
def test_a_value_that_its_node_has_written_to_is_not_given_again(hooks: Callable[[], Any]) -> None:
    with hooks():
        outputs = Spoils.apply(torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
