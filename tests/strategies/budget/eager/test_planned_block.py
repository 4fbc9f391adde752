"""Blocks of every idiom, with any set of storages kept: gradients are bitwise those of the plain block."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies import StrategyError
from strategies.budget.plan import BlockPlan, Drop, Value
from strategies.regions.host_copies import HostLedger
from tests.strategies.budget.eager.idioms import Square, gradient_inside
from tests.strategies.budget.planning.planning_by_hand import Made, enclose, made_in, some
from tests.strategies.meters import Meter

WIDTH = 8


class Body(nn.Module):
    """Two linears, with what a row of the table does between them."""

    def __init__(self, between: Callable[[Body, Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Linear(2 * WIDTH, 2 * WIDTH).requires_grad_(False)
        self.batch_norm = nn.BatchNorm1d(2 * WIDTH)
        self.inner = nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU())
        self.recurrent = nn.LSTM(2 * WIDTH, 2 * WIDTH)
        self.register_buffer("mean", torch.zeros(2 * WIDTH))
        self.mean: Tensor
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.down(self._between(self, self.up(x).tanh())).sigmoid()
        return outputs


def in_place(_: Body, x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    y.relu_()
    return y.cos()


def in_place_after_reads(_: Body, x: Tensor) -> Tensor:
    y = x * 2
    z = y + x.exp()  # reads y as it was
    y.relu_()
    return (y * z).sigmoid()


def into_a_view(_: Body, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, ::2] = x[:, ::2].sin()
    y[:, 1::2].copy_(x[:, 1::2])
    return y.tanh()


def index_put(_: Body, x: Tensor) -> Tensor:
    y = x.clone()
    y.index_put_((torch.tensor([0, 1]),), x[:2].exp(), accumulate=True)
    return y.tanh()


def running_mean(body: Body, x: Tensor) -> Tensor:
    y = (x - body.mean).tanh()  # reads the buffer as it was
    with torch.no_grad():
        body.mean.lerp_(x.mean(0), 0.5)
    return y.exp()


def attention(_: Body, x: Tensor) -> Tensor:
    heads = x.view(1, x.shape[0], 2, WIDTH).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads * 2, heads.sin(), is_causal=True)
    return mixed.transpose(1, 2).reshape(x.shape)


def softmax_in_place(_: Body, x: Tensor) -> Tensor:
    scores = x @ x.t()
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e9)
    return scores.softmax(-1) @ x


def autocasts(body: Body, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = body.inner(x)
    return y.float()


def routed(body: Body, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for chosen in (x.sum(-1) < 0, x.sum(-1) >= 0):
        (token,) = torch.where(chosen)
        y = y.index_add(0, token, body.inner(x.index_select(0, token)))
    return y


def routed_to_those_with_tokens(body: Body, x: Tensor) -> Tensor:
    chosen = x.sum(-1) < 0
    return routed(body, x) if chosen.any() else body.inner(x)


def mask_changed_after_reads(_: Body, x: Tensor) -> Tensor:
    mask = torch.bernoulli(torch.full_like(x, 0.5))
    y = (x + mask).sin()
    mask.mul_(1.25)
    return y.cos() * mask


def noise_made_in_place(_: Body, x: Tensor) -> Tensor:
    noise = torch.empty_like(x).bernoulli_(0.5).div_(0.5)
    return (x * noise).sin() * noise


def noise_from_nothing(body: Body, x: Tensor) -> Tensor:
    body.noise = torch.rand(6, 2 * WIDTH)
    return (x * body.noise).exp()


@torch.library.custom_op("acbench_tests::drop", mutates_args=())
def drop(x: Tensor) -> Tensor:
    """Draw random numbers, which its tags do not tell."""
    dropped: Tensor = x * (torch.rand_like(x) > 0.5)
    return dropped


def save_outputs(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG001 (by name)
    ctx.save_for_backward(output)


def where_not_dropped(ctx: Any, gradient: Tensor) -> Tensor:
    (outputs,) = ctx.saved_tensors
    kept: Tensor = gradient * (outputs != 0)
    return kept


drop.register_autograd(where_not_dropped, setup_context=save_outputs)


def in_place_on_a_view(body: Body, x: Tensor) -> Tensor:
    y: Tensor = body.frozen(body.inner(x.unflatten(0, (2, 3))))
    return (y.add_(1).relu_() * 2).flatten(0, 1)


def recurrent(body: Body, x: Tensor) -> Tensor:
    y: Tensor = body.recurrent(x.unflatten(0, (2, 3)))[0]
    return y.flatten(0, 1)


def split_twice(_: Body, x: Tensor) -> Tensor:
    y = x.cosh()
    first = y.unsafe_split(WIDTH, -1)[0].sin().exp()
    return torch.cat([first, y.unsafe_split(WIDTH, -1)[1]], -1)


BETWEEN: dict[str, Callable[[Body, Tensor], Any]] = {
    "nothing": lambda _, x: x,
    "dropout": lambda _, x: functional.dropout(x, 0.5),
    "dropout in place": lambda _, x: functional.dropout(x * 1, 0.5, inplace=True),
    "two dropouts": lambda _, x: functional.dropout(functional.dropout(x, 0.2).exp(), 0.3),
    "in place": in_place,
    "in place after others have read": in_place_after_reads,
    "written view": into_a_view,
    "index_put": index_put,
    "chunks": lambda _, x: torch.cat(
        [a * b for a, b in zip(x.chunk(2, -1), x.exp().chunk(2, -1), strict=True)], -1
    ),
    "split views that are saved": lambda _, x: torch.cat([part.square() for part in x.split(5, -1)], -1),
    "transposed and expanded": lambda _, x: x * x.mean(0, keepdim=True).expand_as(x).t().contiguous().t(),
    "detached": lambda _, x: x * x.exp().detach() + x.data,
    "a python number": lambda _, x: (x * 2.5 + 1) / 3 - x**3,
    "a function of the user": lambda _, x: Square.apply(x),
    "batch norm": lambda body, x: body.batch_norm(x).relu(),
    "frozen parameters": lambda body, x: body.frozen(x).relu(),
    "a parameter twice": lambda body, x: body.inner(body.inner(x)),
    "a running mean": running_mean,
    "attention": attention,
    "softmax of masked scores": softmax_in_place,
    "a gradient inside": gradient_inside,
    "autocast": autocasts,
    "complex numbers": lambda _, x: torch.fft.ifft(torch.fft.fft(x.exp()).conj() * 2).real,
    "where and gather": lambda _, x: torch.where(x > 0, x.exp(), x).gather(1, x.argsort(-1)),
    "a branch that nobody uses": lambda _, x: (x.exp().sin(), x)[1],
    "a mask that is changed after others have read": mask_changed_after_reads,
    "noise made in place": noise_made_in_place,
    "noise from nothing": noise_from_nothing,
    "leaky units that write their noise": lambda _, x: functional.rrelu(x, training=True).sin(),
    "a random operator without tags": lambda _, x: drop(x).sin().exp(),
    "no gradient": lambda _, x: x * torch.no_grad()(lambda: x.exp().cos())(),
    "experts": routed,
    "linear units in place on the view that a linear made": in_place_on_a_view,
    "a recurrent layer, which makes more where gradients are on": recurrent,
}
SHARES = {"nothing kept": 0.0, "a third kept": 0.35, "most kept": 0.7, "all kept": 1.0}


def made_block(between: Callable[[Body, Tensor], Any]) -> Body:
    torch.manual_seed(0)
    return Body(between)


def trained(model: nn.Module, x: Tensor, steps: int = 2) -> list[Any]:
    found: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        given = x.clone().requires_grad_()
        outputs = model(given)
        outputs.square().sum().backward()
        found += [outputs.detach(), given.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        found += [*(each.clone() for each in model.buffers()), torch.get_rng_state()]
    return found


def planned(block: nn.Module, x: Tensor, share: float, seed: int = 0) -> Made:
    """Put a plan that keeps a share of what `block` makes around it; return all of it."""
    other, given = copy.deepcopy(block), x.clone().requires_grad_()
    made = made_in(lambda: other(given))
    keep = some(made.values, share, seed)
    enclose(block, BlockPlan(fqn="body", keep=keep, operators=made.operators))
    return made


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_gradients_are_bitwise_those_of_the_plain_block(
    between: Callable[[Body, Tensor], Any], share: float
) -> None:
    x = torch.randn(6, WIDTH)
    plain, block = made_block(between), made_block(between)
    planned(block, x, share)
    expected, found = trained(plain, x), trained(block, x)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("after", [(1,), (1, 3)])
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_gradients_are_equal_where_all_is_dropped_in_backward(
    between: Callable[[Body, Tensor], Any], after: tuple[int, ...]
) -> None:
    x = torch.randn(6, WIDTH)
    plain, block = made_block(between), made_block(between)
    made = planned(made_block(between), x, 0.0)
    drop = tuple(Drop(*value, after) for value in made.values)
    keep = some(made.values, 0.35, seed=0)
    enclose(block, BlockPlan(fqn="body", keep=keep, drop=drop, operators=made.operators))
    assert all(map(torch.equal, trained(plain, x), trained(block, x)))


@pytest.mark.parametrize(("kept", "dropped"), [((), (1, 2)), ((1,), (1,))])
def test_what_forward_itself_asks_for_is_dropped(kept: tuple[int, ...], dropped: tuple[int, ...]) -> None:
    x = torch.randn(6, WIDTH)
    plain, block = made_block(gradient_inside), made_block(gradient_inside)
    made = planned(made_block(gradient_inside), x, 0.0)
    keep = tuple(made.values[number] for number in kept)
    drop = tuple(Drop(*made.values[number], (1,)) for number in dropped)
    enclose(block, BlockPlan(fqn="body", keep=keep, drop=drop, operators=made.operators))
    assert all(map(torch.equal, trained(plain, x), trained(block, x)))


NAMED = {
    "a random mask that is changed later": (mask_changed_after_reads, "aten.bernoulli.default"),
    "a product that is changed later": (in_place_after_reads, "aten.mul.Tensor"),
    "noise that is made in place": (noise_made_in_place, "aten.empty_like.default"),
    "a tensor that is filled by slices": (into_a_view, "aten.zeros_like.default"),
    "a tensor that recurrent cells split once more": (split_twice, "aten.cosh.default"),
}


@pytest.mark.parametrize(("between", "name"), NAMED.values(), ids=NAMED)
def test_gradients_are_equal_where_only_that_is_kept(between: Any, name: str) -> None:
    x = torch.randn(6, WIDTH)
    plain, block = made_block(between), made_block(between)
    made = planned(made_block(between), x, 0.0)
    keep = tuple(value for value in made.values if value.name == name)
    assert keep
    enclose(block, BlockPlan(fqn="body", keep=keep, operators=made.operators))
    assert all(map(torch.equal, trained(plain, x), trained(block, x)))


@pytest.mark.parametrize("name", ["aten.bernoulli.p", "aten.rand_like.default"])
def test_random_values_are_the_same_for_each_reader(name: str) -> None:
    def between(_: Body, x: Tensor) -> Tensor:
        noise = torch.bernoulli(x.detach(), p=0.5) if "bernoulli" in name else torch.rand_like(x)
        return (x * noise).sin() * noise

    x = torch.randn(6, WIDTH)
    plain, block = made_block(between), made_block(between)
    made = planned(made_block(between), x, 0.0)
    again = tuple(value for value in made.values if value.name == name)
    assert again
    enclose(block, BlockPlan(fqn="body", recompute=again, again=again, operators=made.operators))
    assert all(map(torch.equal, trained(plain, x), trained(block, x)))


def changes_noise(block: Any, x: Tensor) -> None:
    outputs = block(x)
    block.noise.mul_(0)
    outputs.sum().backward()


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_noise_that_is_changed_before_backward_is_refused(share: float) -> None:
    block, x = made_block(noise_from_nothing), torch.randn(6, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changes_noise(block, x)
    planned(block, x, share)
    with pytest.raises((StrategyError, RuntimeError), match=r"inplace operation|changed in place after"):
        changes_noise(block, x)


def test_a_block_called_twice_before_backward() -> None:
    x = torch.randn(6, WIDTH)
    plain, block = made_block(BETWEEN["dropout"]), made_block(BETWEEN["dropout"])
    planned(block, x, 0.35)
    assert all(map(torch.equal, *(trained(nn.Sequential(each, each), x) for each in (plain, block))))


def test_several_forwards_before_a_backward() -> None:
    x = torch.randn(6, WIDTH)
    gradients = []
    for is_planned in (False, True):
        block = made_block(BETWEEN["two dropouts"])
        if is_planned:
            planned(block, x, 0.35)
        torch.manual_seed(1)
        losses = [block(x * step).square().sum() for step in range(1, 4)]
        losses[1].backward()
        (losses[0] + losses[2]).backward()
        gradients.append([parameter.grad for parameter in block.up.parameters()])
    assert all(map(torch.equal, *gradients))


class Odd(nn.Module):
    """Takes a nest of tensors by name and gives another, through hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.register_forward_hook(lambda *given: given[-1] * 2)
        self.second.register_full_backward_hook(lambda *given: (given[1][0] * 0.5,))

    def forward(self, given: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> dict[str, Any]:
        x, more = given
        y = self.second(self.first(x).tanh() * scale).exp()
        return {"y": (y, None), "z": y * more["bias"].tanh(), "n": 3}


def test_nests_of_tensors_and_hooks_of_modules() -> None:
    x, bias = torch.randn(6, WIDTH), torch.randn(WIDTH, requires_grad=True)
    gradients = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        block = Odd()
        if is_planned:
            enclose(block, BlockPlan(fqn="odd"))
        found = block((x, {"bias": bias}), scale=0.5)
        assert found["n"] == 3
        (found["y"][0].sum() + found["z"].square().sum()).backward()
        gradients.append([*(parameter.grad for parameter in block.parameters()), bias.grad])
        bias.grad = None
    assert all(map(torch.equal, *gradients))


class Chain(nn.Module):
    """A linear and elementwise operators, each of which saves what it reads or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x).exp().sin().exp().sum()
        return outputs


def run_chain(keep: tuple[Value, ...]) -> tuple[int, int]:
    """Return the bytes alive after forward, and the operators of backward."""
    block, x = Chain(), torch.randn(16, WIDTH, requires_grad=True)
    enclose(block, BlockPlan(fqn="chain", keep=keep))
    with Meter(x, *block.parameters()) as meter:
        outputs = block(x)
        alive = meter.alive_bytes(on_host=False) - outputs.untyped_storage().nbytes()
        outputs.backward()
    return alive, meter.flops


COLUMN = 16 * WIDTH * 4
LINEAR, EXP, SIN = (
    Value(0, 0, "aten.addmm.default"),
    Value(1, 0, "aten.exp.default"),
    Value(2, 0, "aten.sin.default"),
)
FORWARD, GRADIENTS = 2 * 16 * WIDTH * WIDTH, 4 * 16 * WIDTH * WIDTH
KEPT = {
    "nothing": ((), 0, FORWARD),
    "what the others follow from, which autograd saves not": ((LINEAR,), COLUMN, 0),
    "what autograd saves": ((EXP,), COLUMN, 0),
    "what half of it follows from": ((SIN,), COLUMN, FORWARD),
    "more than anybody reads": ((LINEAR, EXP), COLUMN, 0),
}


@pytest.mark.parametrize(("keep", "alive", "again"), KEPT.values(), ids=KEPT)
def test_alive_after_forward_is_what_is_kept_and_read(
    keep: tuple[Value, ...], alive: int, again: int
) -> None:
    assert run_chain(keep) == (alive, FORWARD + GRADIENTS + again)


def test_nothing_of_a_step_is_left_after_it_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        for between in (BETWEEN["dropout"], in_place_after_reads, attention, gradient_inside):
            block, x = made_block(between), torch.randn(6, WIDTH)
            planned(block, x, 0.35)
            given = x.clone().requires_grad_()
            outputs = block(given)
            alive = weakref.ref(outputs.untyped_storage()), weakref.ref(given)
            outputs.sum().backward()
            del outputs, given
            assert [each() for each in alive] == [None, None]
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_graph_that_nobody_differentiates_is_freed() -> None:
    block, x = made_block(attention), torch.randn(6, WIDTH)
    planned(block, x, 0.35)
    given = x.clone().requires_grad_()
    alive = weakref.ref(given)
    gc.disable()
    try:
        block(given)
        del given
        assert alive() is None
    finally:
        gc.enable()


def changes_output(block: nn.Module, x: Tensor) -> None:
    outputs = block(x)
    outputs.mul_(2)
    outputs.sum().backward()


def changes_input(block: nn.Module, x: Tensor) -> None:
    given = x * 1
    outputs = block(given)
    given.mul_(2)
    outputs.sum().backward()


def changes_buffer(block: nn.Module, x: Tensor) -> None:
    outputs = block(x)
    block.mean.add_(1)  # type: ignore[operator, union-attr]
    outputs.sum().backward()


def backward_twice(block: nn.Module, x: Tensor) -> None:
    outputs = block(x).sum()
    outputs.backward(retain_graph=True)
    outputs.backward()


def reads_mean(body: Body, x: Tensor) -> Tensor:
    return (x - body.mean).tanh()


MISUSED: dict[str, tuple[Any, Any, str]] = {
    "an output is changed that backward needs": (
        BETWEEN["nothing"],
        changes_output,
        "modified by an inplace operation: [torch.float32 [6, 8]] is at version 1; expected version 0",
    ),
    "an input is changed that operators read again": (
        BETWEEN["nothing"],
        changes_input,
        "aten.addmm.default reads a float32 tensor of [6, 8] that was changed in place after forward",
    ),
    "a buffer is changed that an operator reads again": (
        reads_mean,
        changes_buffer,
        (
            "ac.plan: aten.sub.Tensor reads a float32 tensor of [16] that was changed in place after "
            "forward, so that it cannot run again; change it after backward, or change a copy"
        ),
    ),
    "a second backward": (
        BETWEEN["nothing"],
        backward_twice,
        (
            "ac: backward runs a second time through a block whose plan has let go of what it needs; use "
            "ac=full for backward with retain_graph or create_graph"
        ),
    ),
}


@pytest.mark.parametrize(("between", "misuse", "message"), MISUSED.values(), ids=MISUSED)
def test_refusal_in_backward(between: Any, misuse: Any, message: str) -> None:
    block, x = made_block(between), torch.randn(6, WIDTH, requires_grad=True)
    planned(block, x, 0.0)
    with pytest.raises((StrategyError, RuntimeError)) as error:
        misuse(block, x)
    assert message in str(error.value)


UNLIKE = {
    "another operator": (
        BlockPlan(fqn="body", keep=(Value(0, 0, "aten.mm.default"),)),
        "operator 0 is aten.addmm.default and was aten.mm.default",
    ),
    "fewer operators": (BlockPlan(fqn="body", operators=7), "its forward has 4 operators and had 7"),
    "a result that is none": (
        BlockPlan(fqn="body", keep=(Value(0, 1, "aten.addmm.default"),)),
        "its forward has no aten.addmm.default.1 (0)",
    ),
}


@pytest.mark.parametrize(("plan", "problem"), UNLIKE.values(), ids=UNLIKE)
def test_refusal_of_a_forward_that_was_not_planned(plan: BlockPlan, problem: str) -> None:
    block = made_block(BETWEEN["nothing"])
    enclose(block, plan)
    with pytest.raises(StrategyError) as error:
        block(torch.randn(6, WIDTH))
    remedy = "a plan is for one forward; plan a step with data (Budget.write_plan), or use ac=nested"
    assert str(error.value) == f"ac: 'body' is not as it was planned: {problem}; {remedy}"


def test_refusal_of_a_later_call_that_makes_what_calls_find() -> None:
    makes = [False]

    def making(body: Body, x: Tensor) -> Tensor:
        if makes[0]:
            body.__dict__["table"] = x.detach().exp()
        return x

    block = made_block(making)
    planned(block, torch.randn(6, WIDTH), 0.35)
    block(torch.randn(6, WIDTH))
    makes[0] = True
    with pytest.raises(StrategyError, match="'body' is not as it was planned: "):
        block(torch.randn(6, WIDTH))


def test_experts_get_other_numbers_of_tokens_than_in_the_planned_step() -> None:
    spread, gathered = torch.randn(6, WIDTH), torch.zeros(6, WIDTH)
    plain, block = made_block(routed), made_block(routed)
    planned(block, spread, 0.35)
    assert all(map(torch.equal, trained(plain, gathered), trained(block, gathered)))


def test_refusal_of_experts_that_are_left_out_without_tokens() -> None:
    block = made_block(routed_to_those_with_tokens)
    with torch.no_grad():
        block.up.bias.fill_(-1.0)
    planned(block, torch.zeros(6, WIDTH), 0.35)
    with torch.no_grad():
        block.up.bias.fill_(1.0)
    with pytest.raises(StrategyError, match="'body' is not as it was planned: operator"):
        block(torch.zeros(6, WIDTH))


def test_refusal_of_an_operator_that_moves_memory() -> None:
    block = made_block(lambda _, x: x.clone().set_(x.exp().untyped_storage()))
    enclose(block, BlockPlan(fqn="body"))
    with pytest.raises(
        StrategyError, match=r"aten.set_.source_Storage in 'body' moves memory between tensors"
    ):
        block(torch.randn(6, WIDTH))


def test_evaluation_runs_the_forward_alone() -> None:
    block = made_block(BETWEEN["nothing"])
    enclose(block, BlockPlan(fqn="body", operators=1))  # would be refused
    with torch.no_grad():
        block(torch.randn(6, WIDTH))


def test_what_is_offloaded_waits_on_the_host() -> None:
    x = torch.randn(6, WIDTH)
    plain, block = made_block(attention), made_block(attention)
    made = made_in(partial(made_block(attention), x))
    ledger = HostLedger()
    enclose(block, BlockPlan(fqn="body", keep=tuple(made.values[:2]), offload=tuple(made.values[2:])), ledger)
    assert all(map(torch.equal, trained(plain, x), trained(block, x)))
    with Meter(x, *block.parameters(), *block.buffers()) as meter:
        outputs = block(x)
        on_host = meter.alive_bytes(on_host=True)
    assert 0 < on_host == ledger.offloaded_bytes
    outputs.sum().backward()


def test_hooks_around_a_block_pack_what_is_from_outside() -> None:
    seen: list[Tensor] = []
    block = made_block(BETWEEN["nothing"])
    enclose(block, BlockPlan(fqn="body"))
    x = torch.randn(6, WIDTH, requires_grad=True)

    def pack(saved: Tensor) -> Tensor:
        seen.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        block(x).sum().backward()
    expected = {each.data_ptr() for each in (x, block.up.weight, block.down.weight)}
    assert {each.data_ptr() for each in seen} == expected


def test_random_numbers_go_on_as_if_nothing_had_run_again() -> None:
    x = torch.randn(6, WIDTH)
    state = []
    for is_planned in (False, True):
        block = made_block(BETWEEN["dropout"])
        if is_planned:
            planned(block, x, 0.0)
        torch.manual_seed(0)
        outputs = block(x)
        torch.rand(3)
        outputs.sum().backward()
        state.append(torch.get_rng_state())
    assert torch.equal(*state)
