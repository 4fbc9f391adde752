"""offload: what is moved, once, and that nothing stays behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence

from strategies import StrategyError
from strategies.ac.offload import Offload
from strategies.regions.host_copies import HostCopy, HostLedger
from strategies.regions.region import regions
from strategies.regions.versions import Version
from tests.gpu.devices import CUDA
from tests.strategies.meters import measure
from tests.strategies.toys import WIDTH, Block, Stack, differences, toy, train_step


def enclosed(block: nn.Module) -> tuple[Offload, Stack]:
    strategy, model = Offload(layers_fqn="layers"), Stack(block)
    strategy.apply(model)
    return strategy, model


class Body(nn.Module):
    """A block whose forward is the given function of the block and its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("table", torch.randn(8, WIDTH))
        self.constant = torch.randn(8, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.function(self, x)
        return outputs


X = 8 * WIDTH * 4  # bytes of the input
MOVED: dict[str, tuple[Any, int]] = {
    "the input of a product, never its weight": (lambda m, x: x @ m.weight, X),
    "nor a view of the weight": (lambda m, x: x @ m.weight.t(), X),
    "nor a buffer": (lambda m, x: x * m.table, 0),
    "nor a tensor kept as an attribute": (lambda m, x: x * m.constant, 0),
    "an input saved twice once": (lambda _, x: x.sin() + x.cos(), X),
    "two views of one storage once": (lambda _, x: x[:4].sin() + x[4:].cos(), X),
    "a storage seen as another type once": (lambda _, x: x.sin() + (x.view(torch.int32) > 0), X),
    "a result": (lambda _, x: x.exp(), X),
    "integers that autograd saves": (
        lambda _, x: x.gather(0, torch.zeros(1, WIDTH, dtype=torch.int64)),
        X + 8 * WIDTH,
    ),
    "nothing that is not saved": (lambda _, x: x + 1, 0),
}


@pytest.mark.parametrize(("function", "moved_bytes"), MOVED.values(), ids=MOVED)
def test_bytes_moved_and_gradients(function: Any, moved_bytes: int) -> None:
    torch.manual_seed(0)
    body = Body(function)
    value = torch.randn(8, WIDTH)
    expected, actual = value.clone().requires_grad_(), value.clone().requires_grad_()
    body(expected).square().sum().backward()
    strategy, model = enclosed(body)
    model.block(actual).square().sum().backward()
    assert torch.equal(expected.grad, actual.grad)  # type: ignore[arg-type]
    assert strategy.observe(model).offloaded_bytes == moved_bytes


def test_complex_conjugates_and_negatives_survive() -> None:
    strategy, model = enclosed(Body(lambda _, z: (z.conj() * z.imag.neg()).abs()))
    value = torch.randn(8, WIDTH, dtype=torch.complex64)
    gradients = []
    for call in (Body(lambda _, z: (z.conj() * z.imag.neg()).abs()), model.block):
        z = value.clone().requires_grad_()
        call(z).sum().backward()
        gradients.append(z.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]
    assert strategy.observe(model).offloaded_bytes > 0


def test_the_whole_block_waits_on_the_host() -> None:
    strategy, model = enclosed(Block(bias=False, dropout=0.0))
    plain = measure(Block(bias=False, dropout=0.0), torch.randn(2, 4, WIDTH, requires_grad=True))
    moved = measure(model.block, torch.randn(2, 4, WIDTH, requires_grad=True))
    assert moved.saved_bytes == 0
    assert moved.host_bytes == strategy.observe(model).offloaded_bytes
    assert moved.host_bytes == plain.saved_bytes + X  # and the input, which the plain block's caller keeps
    assert moved.backward_flops == plain.backward_flops


def test_the_ledger_counts_the_latest_step() -> None:
    strategy = Offload(layers_fqn="layers")
    model = strategy.apply(toy())
    train_step(model)
    first = strategy.observe(model).offloaded_bytes
    train_step(model)
    assert strategy.observe(model).offloaded_bytes == first > 0


def test_host_copies_are_gone_after_backward() -> None:
    _, model = enclosed(Block(bias=True, dropout=0.1))
    copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
    original = HostLedger.copy_of

    class Spy(HostLedger):
        def copy_of(self, local: Tensor, version: Version, region: Hashable) -> HostCopy:
            copy = original(self, local, version, region)
            copies.add(copy)
            return copy

    vars(model.block)["_acbench_region"].ledger = Spy()
    outputs = model.block(torch.randn(2, 4, WIDTH, requires_grad=True))
    assert len(copies) > 5
    outputs.sum().backward()
    del outputs
    gc.collect()
    assert len(copies) == 0


def test_a_graph_dropped_without_backward_frees_its_copies() -> None:
    strategy, model = enclosed(Block(bias=True, dropout=0.0))
    outputs = model.block(torch.randn(2, 4, WIDTH, requires_grad=True))
    ledger = vars(model.block)["_acbench_region"].ledger
    assert len(ledger._copies) > 5
    del outputs
    gc.collect()
    assert len(ledger._copies) == 0
    assert strategy.observe(model).offloaded_bytes > 0


def test_backward_twice_through_one_graph() -> None:
    torch.manual_seed(0)
    _, model = enclosed(Block(bias=True, dropout=0.0))
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    loss = model.block(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def written_between_two_saves(write: Any) -> Any:
    def function(_: nn.Module, x: Tensor) -> Tensor:
        hidden = x * 1
        first = hidden.detach().sin() * x
        write(hidden)
        return first + hidden.detach() * x

    return function


def written_parts(m: nn.Module, x: Tensor) -> Tensor:
    first, second = (x @ m.weight).unsafe_chunk(2, 1)  # type: ignore[operator]
    return first.sigmoid_() * second.tanh_()  # each is saved by what writes it


WRITTEN: dict[str, Any] = {
    "with its counter": written_between_two_saves(lambda y: y.detach().mul_(2)),
    "through its data, which has another": written_between_two_saves(lambda y: y.data.mul_(2)),
    "where nobody counts": written_between_two_saves(lambda y: y.detach().numpy().__imul__(2)),
    "in parts with counters of their own": written_parts,
    "by an operator that saves its noise before it draws it": lambda m, x: nn.functional.rrelu(
        x @ m.weight, training=True
    ),
    "by one that writes its input, too": lambda m, x: nn.functional.rrelu_(x @ m.weight, training=True),
    "by the cells of a GRU": lambda m, x: m.gru(x)[0],
    "by the cells of a packed LSTM": lambda m, x: m.lstm(pack_sequence([x, x[:3], x[:2]]))[0].data,
}


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN)
def test_a_storage_written_between_two_saves_is_moved_twice(function: Any) -> None:
    torch.manual_seed(0)
    body = Body(function)
    body.gru, body.lstm = nn.GRU(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
    value, gradients = torch.randn(8, WIDTH), []
    for call in (body, enclosed(body)[1].block):
        torch.manual_seed(1)
        x = value.clone().requires_grad_()
        call(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in body.parameters())])
        body.zero_grad()
    for expected, actual in zip(*gradients, strict=True):
        assert expected is actual is None or torch.equal(expected, actual)  # type: ignore[arg-type]


def test_a_constant_that_is_written_after_it_was_saved_is_refused() -> None:
    def function(_: nn.Module, x: Tensor) -> Tensor:
        mask = torch.zeros(8, WIDTH)
        y = x * mask
        mask.mul_(2)
        return y

    for call in (Body(function), enclosed(Body(function))[1].block):
        outputs = call(torch.ones(8, WIDTH, requires_grad=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.sum().backward()


def test_fake_tensors_are_moved_alike() -> None:
    strategy = Offload(layers_fqn="layers")
    real = strategy.apply(toy("no_dropout"))
    train_step(real)
    with FakeTensorMode():
        fake = strategy.apply(toy("no_dropout"))
        train_step_without_values(fake)
    assert strategy.observe(fake).offloaded_bytes == strategy.observe(real).offloaded_bytes


def train_step_without_values(model: nn.Module) -> None:
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("device", [CUDA])
def test_parity_on_cuda_with_overlapped_copies(device: str) -> None:
    plain, model = toy().to(device), toy().to(device)
    Offload(layers_fqn="layers").apply(model)
    tokens = torch.arange(16, device=device).view(2, 8) % 11
    for _ in range(3):
        gradients = []
        for candidate in (plain, model):
            torch.manual_seed(5)
            candidate.zero_grad()
            candidate(tokens).square().mean().backward()
            gradients.append([p.grad for p in candidate.parameters()])
        assert all(torch.equal(old, new) for old, new in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_parity_with_gradients_accumulated_over_two_batches() -> None:
    plain, model = toy(), toy()
    Offload(layers_fqn="layers").apply(model)
    for candidate in (plain, model):
        torch.manual_seed(4)
        for _ in range(2):
            candidate(torch.randint(0, 11, (2, 8))).square().mean().backward()
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, actual.grad)  # type: ignore[arg-type]
    assert differences(train_step(plain), train_step(model)) == []


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiler_may_record_around_the_hooks() -> None:
    torch._dynamo.reset()
    strategy, gradients = Offload(layers_fqn="layers"), []
    for model in (
        Stack(Block(bias=False, dropout=0.0)),
        strategy.apply(Stack(Block(bias=False, dropout=0.0))),
    ):
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        model.get_submodule("layers.0").compile(backend="eager")
        x = torch.linspace(-1, 1, 4 * WIDTH).view(1, 4, WIDTH).requires_grad_()
        model.get_submodule("layers.0")(x).square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *gradients))
    assert strategy.observe(model).offloaded_bytes > 0


@pytest.mark.parametrize(("least_bytes", "moved_bytes"), [(X, X), (X + 1, 0)], ids=["equal", "smaller"])
def test_small_storages_stay(least_bytes: int, moved_bytes: int) -> None:
    strategy, model = Offload(layers_fqn="layers", least_bytes=least_bytes), Stack(Body(lambda _, x: x.exp()))
    strategy.apply(model)
    x = torch.randn(8, WIDTH, requires_grad=True)
    outputs = model(x)
    outputs.sum().backward()
    assert strategy.observe(model).offloaded_bytes == moved_bytes
    assert torch.equal(x.grad, outputs)  # type: ignore[arg-type]


def test_the_last_blocks_keep_what_they_save() -> None:
    moved = []
    for keep_last in (0, 1, 2):
        strategy = Offload(layers_fqn="layers", keep_last=keep_last)
        model = strategy.apply(toy())
        assert differences(train_step(toy()), train_step(model)) == []  # type: ignore[arg-type]
        moved.append(strategy.observe(model).offloaded_bytes)
    assert moved[0] - moved[1] == moved[1] - moved[2] > 0
    assert [Offload(keep_last=each).acts_on_each_block_alone for each in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("share", "blocks"),
    [
        pytest.param(1.0, [0, 1, 2, 3, 4, 5, 6, 7, 8], id="all"),
        pytest.param(0.5, [1, 3, 5, 7], id="every second"),
        pytest.param(1 / 3, [2, 5, 8], id="every third"),
        pytest.param(0.7, [1, 2, 4, 5, 7, 8], id="two of three, nearly"),
        pytest.param(0.2, [4], id="one in five"),
    ],
)
def test_a_share_of_the_blocks_is_spread_evenly(share: float, blocks: list[int]) -> None:
    strategy = Offload(layers_fqn="layers", share=share, keep_last=1)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(10))
    strategy.apply(model)
    assert list(regions(model)) == [f"layers.{block}" for block in blocks]
    assert not strategy.acts_on_each_block_alone


def test_a_share_moves_its_part_and_the_gradients_stay() -> None:
    moved = []
    for share in (1.0, 0.5):
        strategy = Offload(layers_fqn="layers", share=share)
        model = strategy.apply(toy())
        assert differences(train_step(toy()), train_step(model)) == []  # type: ignore[arg-type]
        moved.append(strategy.observe(model).offloaded_bytes)
    assert moved[0] == 3 * moved[1] > 0


@pytest.mark.parametrize("fetch_ahead", [0, 1, 3])
def test_as_many_storages_are_fetched_ahead_as_were_asked_for(fetch_ahead: int) -> None:
    ledger = Offload(fetch_ahead=fetch_ahead)._region_maker()("").ledger  # type: ignore[attr-defined]
    storages = [torch.full((4,), float(number)) for number in range(5)]
    copies = [ledger.copy_of(each, Version(counter=each, expected=each._version), None) for each in storages]
    assert torch.equal(ledger.taken(copies[-1]), storages[-1])
    assert copies[-1]._flat is None
    ledger.restored(copies[-1])
    there = [copy._flat is not None for copy in copies]
    assert there == [number >= 4 - fetch_ahead for number in range(5)]


@pytest.mark.parametrize(
    ("fields", "act", "message"),
    [
        pytest.param(
            {"keep_last": 3},
            lambda strategy: strategy.apply(toy()),
            "ac.keep_last: is 3, and the model has 3 blocks; use at most 2, or ac=none",
            id="no block left",
        ),
        pytest.param(
            {"keep_last": -1}, lambda _: None, "ac.keep_last: must be at least 0, got -1", id="below zero"
        ),
        pytest.param(
            {"keep_last": 1},
            lambda strategy: strategy.call_site(toy()),
            "wrap_order: call_site makes the model one region, and ac.keep_last chooses among blocks; "
            "use inside_fsdp",
            id="no blocks",
        ),
        pytest.param(
            {"share": 0.3},
            lambda strategy: strategy.apply(toy()),
            "ac.share: is 0.3, less than one of 3 blocks; use at least 0.334",
            id="no whole block",
        ),
        pytest.param(
            {"share": 0.0}, lambda _: None, "ac.share: must be above 0 and at most 1, got 0.0", id="no share"
        ),
        pytest.param(
            {"share": 0.5},
            lambda strategy: strategy.call_site(toy()),
            "wrap_order: call_site makes the model one region, and ac.share chooses among blocks; "
            "use inside_fsdp",
            id="no blocks to share",
        ),
        pytest.param(
            {"fetch_ahead": -1}, lambda _: None, "ac.fetch_ahead: must be at least 0, got -1", id="behind"
        ),
        pytest.param(
            {"least_bytes": 8},
            lambda strategy: strategy.view("file", toy(), ()),
            "ac.least_bytes: is 8, which a written file has no words for; use 0",
            id="a written file",
        ),
    ],
)
def test_what_leaves_nothing_to_move_is_refused(fields: dict[str, float], act: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        act(Offload(layers_fqn="layers", **fields))  # type: ignore[arg-type]
    assert str(error.value) == message
