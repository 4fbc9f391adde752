"""Offload kinds: what each moves, and that they compose with checkpoints, other regions and other hooks."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from strategies import StrategyError
from strategies.regions.offload_kinds import OFFLOAD_KINDS, OffloadKind
from strategies.regions.offloading import HostLedger, Offloading
from strategies.regions.torch_facts import selective_takes_hooks
from tests.strategies.meters import measure
from tests.strategies.toys import WIDTH

ROWS = 8
X = ROWS * WIDTH * 4  # bytes of one activation
Call: TypeAlias = Callable[..., Any]

each_kind = pytest.mark.parametrize("kind", OFFLOAD_KINDS)
early_stop = pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "to the end"])


def checkpointed(call: Call, **options: Any) -> Call:
    return partial(checkpoint, call, use_reentrant=False, **options)


# What each kind moves


class Body(nn.Module):
    """A module whose forward is the given function of the module and its inputs."""

    def __init__(self, function: Call) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.table: Tensor
        self.register_buffer("table", torch.randn(ROWS, WIDTH))
        self.constant = torch.randn(ROWS, WIDTH)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Bytes that a region of each kind moves."""

    all: int
    inputs: int
    internals: int


MOVED: dict[str, tuple[Call, Bytes]] = {
    "an input": (lambda _, x: x.sin(), Bytes(all=X, inputs=X, internals=0)),
    "a view of an input": (lambda _, x: x[:4].t().sin(), Bytes(all=X, inputs=X, internals=0)),
    "a result": (lambda _, x: x.exp(), Bytes(all=X, inputs=0, internals=X)),
    "a tensor in between": (lambda _, x: (x + 1).sin(), Bytes(all=X, inputs=0, internals=X)),
    "an input and a result": (lambda _, x: x.sin().exp(), Bytes(all=2 * X, inputs=X, internals=X)),
    "a copy of an input": (lambda _, x: x.clone().sin(), Bytes(all=X, inputs=0, internals=X)),
    "an input written before it is saved": (
        lambda _, x: (x + 1).mul_(2).sin(),
        Bytes(all=X, inputs=0, internals=X),
    ),
    "the input of a product": (lambda m, x: x @ m.weight, Bytes(all=X, inputs=X, internals=0)),
    "no view of a weight": (lambda m, x: (x + 1) @ m.weight.t(), Bytes(all=X, inputs=0, internals=X)),
    "no buffer": (lambda m, x: x * m.table, Bytes(all=0, inputs=0, internals=0)),
    "no tensor kept as an attribute": (lambda m, x: x * m.constant, Bytes(all=0, inputs=0, internals=0)),
    "integers made inside": (
        lambda _, x: x.gather(0, torch.zeros(1, WIDTH, dtype=torch.int64)),
        Bytes(all=X + 8 * WIDTH, inputs=X, internals=8 * WIDTH),
    ),
    "nothing that is not saved": (lambda _, x: x + 1, Bytes(all=0, inputs=0, internals=0)),
}


@each_kind
@pytest.mark.parametrize(("function", "expected"), MOVED.values(), ids=MOVED)
def test_bytes_moved_and_fetched_and_gradients(function: Call, expected: Bytes, kind: OffloadKind) -> None:
    body, value = Body(function), torch.randn(ROWS, WIDTH)
    region = Offloading(ledger=HostLedger(), kind=kind)
    plain, offloaded = value.clone().requires_grad_(), value.clone().requires_grad_()
    body(plain).square().sum().backward()
    outputs = region(body, body.forward, (offloaded,), {})
    assert region.moved_bytes == region.ledger.offloaded_bytes == getattr(expected, kind)
    outputs.square().sum().backward()
    assert region.fetched_bytes == region.moved_bytes
    assert equal(plain.grad, offloaded.grad)


INPUTS: dict[str, tuple[Call, tuple[Any, ...], dict[str, Any], Bytes]] = {
    "by keyword, in a dictionary": (
        lambda _, tensors: tensors["x"].sin().exp(),
        (),
        {"tensors": {"x": torch.ones(ROWS, WIDTH, requires_grad=True)}},
        Bytes(all=2 * X, inputs=X, internals=X),
    ),
    "frozen": (
        lambda m, x: (x @ m.weight).exp(),
        (torch.ones(ROWS, WIDTH),),
        {},
        Bytes(all=2 * X, inputs=X, internals=X),
    ),
    "token numbers": (
        lambda m, tokens: nn.functional.embedding(tokens, m.weight).exp(),
        (torch.arange(ROWS),),
        {},
        Bytes(all=8 * ROWS + X, inputs=8 * ROWS, internals=X),
    ),
    "no tensor": (
        lambda m, rows: (m.weight[:rows] * 2).exp(),
        (ROWS,),
        {},
        Bytes(all=X, inputs=0, internals=X),
    ),
    "a parameter of another module": (
        lambda _, weight: (weight * 2).sin() * weight,
        (nn.Parameter(torch.ones(ROWS, WIDTH)),),
        {},
        Bytes(all=2 * X, inputs=0, internals=2 * X),
    ),
}


@each_kind
@pytest.mark.parametrize(("function", "args", "kwargs", "expected"), INPUTS.values(), ids=INPUTS)
def test_bytes_moved_of_inputs_that_are(
    function: Call, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Bytes, kind: OffloadKind
) -> None:
    region, body = Offloading(ledger=HostLedger(), kind=kind), Body(function)
    region(body, body.forward, args, kwargs).sum().backward()
    assert region.moved_bytes == getattr(expected, kind)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(StrategyError) as error:
        Offloading(ledger=HostLedger(), kind=cast("OffloadKind", "outputs"))
    assert str(error.value) == "offload: must be one of all, inputs, internals, got 'outputs'"


@each_kind
def test_second_derivatives(kind: OffloadKind) -> None:
    body, value = Body(lambda m, x: (x.sin() @ m.weight).exp()), torch.randn(ROWS, WIDTH)
    region = Offloading(ledger=HostLedger(), kind=kind)
    second = []
    for call in (body, lambda x: region(body, body.forward, (x,), {})):
        x = value.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), [x, body.weight]))
    assert all(map(torch.equal, *second))


@each_kind
def test_a_result_is_freed_with_its_graph(kind: OffloadKind) -> None:
    region, body = Offloading(ledger=HostLedger(), kind=kind), Body(lambda _, x: x.exp())
    outputs = region(body, body.forward, (torch.ones(ROWS, WIDTH, requires_grad=True),), {})
    storage = StorageWeakRef(outputs.untyped_storage())
    del outputs
    gc.collect()
    assert storage.expired()


# A region inside checkpoints


class Stages(nn.Module):
    """Three stages of a product, `tanh` and dropout, called as `arrange` says; counts calls of products.

    A stage saves its input, its weight, the result of `tanh` and the noise of dropout: 3 X to move.
    """

    def __init__(self, arrange: Callable[[Stages], Call] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)
        )
        self.calls = [0, 0, 0]
        for index, stage in enumerate(self.stages):
            stage.get_submodule("0").register_forward_pre_hook(partial(self._count, index))
        self.ledger = HostLedger()
        self.regions: list[Offloading] = []
        self.arranged = arrange(self) if arrange is not None else self.run(0, 1, 2)

    def _count(self, index: int, _module: nn.Module, _inputs: Any) -> None:
        self.calls[index] += 1

    def run(self, *parts: int | Call) -> Call:
        """Return a callable that runs `parts` in a row: stages by number, or callables."""
        calls = [self.stages[part] if isinstance(part, int) else part for part in parts]

        def run(x: Tensor) -> Tensor:
            for call in calls:
                x = call(x)
            return x

        return run

    def moved(self, kind: OffloadKind, *parts: int | Call) -> Call:
        """Return a callable that runs `parts` in a row, in an offloading region."""
        region = Offloading(ledger=self.ledger, kind=kind)
        self.regions.append(region)
        body = self.run(*parts)
        return lambda x: region(self.stages, body, (x,), {})

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.arranged(x)
        return outputs


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return the gradients of one step of `model` under one seed: of the input and of the parameters."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model.zero_grad()
    model(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def equal(*pair: Tensor | None) -> bool:
    return all(tensor is not None for tensor in pair) and torch.equal(*cast("tuple[Tensor, Tensor]", pair))


SAVES_MORE_THAN_INPUTS = hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
"""Whether a checkpoint has autograd save its inputs, and an empty tensor with them that is none of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A way to arrange the stages, and what one step must show.

    Fields:
        saved_bytes, host_bytes: storages in use after forward.
        calls: of each product with early stop; `calls_to_the_end` without.
    """

    arrange: Callable[[Stages], Call]
    saved_bytes: int = 0
    host_bytes: int = 0
    calls: list[int]
    calls_to_the_end: list[int]


COMPOSED = {
    "no checkpoint, inputs": Composed(
        arrange=lambda s: s.run(0, s.moved("inputs", 1), 2),
        saved_bytes=7 * X,  # of 8: the input of the model is its caller's
        host_bytes=X,
        calls=[1, 1, 1],
        calls_to_the_end=[1, 1, 1],
    ),
    "no checkpoint, internals": Composed(
        arrange=lambda s: s.run(0, s.moved("internals", 1), 2),
        saved_bytes=6 * X,
        host_bytes=2 * X,
        calls=[1, 1, 1],
        calls_to_the_end=[1, 1, 1],
    ),
    "the checkpoint alone": Composed(
        arrange=lambda s: checkpointed(s.run(0, 1, 2)),
        calls=[2, 2, 2],
        calls_to_the_end=[2, 2, 2],
    ),
    "all of the second": Composed(
        arrange=lambda s: checkpointed(s.run(0, s.moved("all", 1), 2)),
        host_bytes=3 * X,
        calls=[2, 2, 2],  # the third needs its input
        calls_to_the_end=[2, 2, 2],
    ),
    "inputs of the second": Composed(
        arrange=lambda s: checkpointed(s.run(0, s.moved("inputs", 1), 2)),
        host_bytes=X,
        calls=[2, 2, 2],
        calls_to_the_end=[2, 2, 2],
    ),
    "internals of the second": Composed(
        arrange=lambda s: checkpointed(s.run(0, s.moved("internals", 1), 2)),
        host_bytes=2 * X,
        calls=[2, 2, 2],
        calls_to_the_end=[2, 2, 2],
    ),
    "all of the last is not recomputed": Composed(
        arrange=lambda s: checkpointed(s.run(0, 1, s.moved("all", 2))),
        host_bytes=3 * X,
        calls=[2, 2, 1],
        calls_to_the_end=[2, 2, 2],
    ),
    "all of all leaves nothing to recompute": Composed(
        arrange=lambda s: checkpointed(s.run(*(s.moved("all", index) for index in range(3)))),
        host_bytes=9 * X,
        calls=[1, 1, 1],
        calls_to_the_end=[1, 1, 1],
    ),
    "nor to hold, in a checkpoint after a stage": Composed(
        arrange=lambda s: s.run(0, checkpointed(s.moved("all", 1, 2))),
        saved_bytes=2 * X,  # of the first stage
        host_bytes=6 * X,
        calls=[1, 1, 1],
        calls_to_the_end=[1, 1, 1],
    ),
    "inputs and internals side by side": Composed(
        arrange=lambda s: checkpointed(s.run(s.moved("internals", 0), s.moved("inputs", 1), 2)),
        host_bytes=3 * X,
        calls=[2, 2, 2],
        calls_to_the_end=[2, 2, 2],
    ),
    "two checkpoints alone": Composed(
        arrange=lambda s: checkpointed(s.run(checkpointed(s.run(0)), checkpointed(s.run(1, 2)))),
        calls=[3, 2, 2],
        calls_to_the_end=[3, 3, 3],
    ),
    "the inputs of two checkpoints replace the outer one": Composed(
        arrange=lambda s: checkpointed(
            s.run(s.moved("inputs", checkpointed(s.run(0))), s.moved("all", checkpointed(s.run(1, 2))))
        ),
        host_bytes=2 * X,
        calls=[2, 2, 2],
        calls_to_the_end=[3, 3, 3] if SAVES_MORE_THAN_INPUTS else [2, 2, 2],
    ),
    "the internals of a checkpoint are not its input": Composed(
        arrange=lambda s: checkpointed(s.run(0, s.moved("internals", checkpointed(s.run(1, 2))))),
        calls=[2, 2, 2],
        calls_to_the_end=[2, 3, 3],
    ),
    "all inside two levels": Composed(
        arrange=lambda s: checkpointed(s.run(0, checkpointed(s.run(s.moved("all", 1), 2)))),
        host_bytes=3 * X,
        calls=[2, 2, 2],
        calls_to_the_end=[2, 3, 3],
    ),
    "internals around and inside": Composed(
        arrange=lambda s: checkpointed(
            s.moved("internals", 0, checkpointed(s.run(1, s.moved("internals", 2))))
        ),
        # of the first stage, the input of the inner checkpoint, and of the third stage
        host_bytes=(2 + 1 + 2) * X,
        calls=[2, 2, 2],
        calls_to_the_end=[2, 3, 3],
    ),
    "inside a reentrant checkpoint": Composed(
        arrange=lambda s: partial(checkpoint, s.run(0, s.moved("all", 1), 2), use_reentrant=True),
        calls=[2, 2, 2],
        calls_to_the_end=[2, 2, 2],
    ),
}


@early_stop
@pytest.mark.parametrize("composed", COMPOSED.values(), ids=COMPOSED)
def test_composition_with_checkpoints(composed: Composed, *, early_stop: bool) -> None:
    model = Stages(composed.arrange)
    with set_checkpoint_early_stop(early_stop):
        measured = measure(model, torch.randn(ROWS, WIDTH, requires_grad=True))
        assert model.calls == (composed.calls if early_stop else composed.calls_to_the_end)
        assert (measured.saved_bytes, measured.host_bytes) == (composed.saved_bytes, composed.host_bytes)
        assert model.ledger.offloaded_bytes == composed.host_bytes
        assert sum(region.moved_bytes for region in model.regions) == composed.host_bytes
        for _ in range(2):
            assert all(map(equal, gradients(model), gradients(Stages())))


@early_stop
@each_kind
def test_composition_with_a_checkpoint_that_saves_products(kind: OffloadKind, *, early_stop: bool) -> None:
    saving = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    hooks = {"respect_saved_tensors_hooks": False} if selective_takes_hooks() else {}
    model = Stages(lambda s: checkpointed(s.run(0, s.moved(kind, 1), 2), context_fn=saving, **hooks))
    with set_checkpoint_early_stop(early_stop):
        assert all(map(equal, gradients(model), gradients(Stages())))


def test_what_is_not_recomputed_needs_no_random_numbers() -> None:
    model = Stages(lambda s: checkpointed(s.moved("all", 0, 1, 2), preserve_rng_state=False))
    assert all(map(equal, gradients(model), gradients(Stages())))


@each_kind
def test_a_parameter_given_through_two_checkpoints(kind: OffloadKind) -> None:
    region, body = Offloading(ledger=HostLedger(), kind=kind), Body(lambda _, x, weight: (x @ weight).exp())

    def inner(x: Tensor, weight: Tensor) -> Any:
        return region(body, body.forward, (x, weight), {})

    def outer(x: Tensor) -> Any:  # in recomputation, the inner checkpoint gives a plain tensor on
        return checkpoint(inner, x.sin(), body.weight, use_reentrant=False)

    found = []
    for call in (lambda x: body(x.sin(), body.weight), checkpointed(outer)):
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        found.append(torch.autograd.grad(call(x).sum(), [x, body.weight]))
    assert all(map(torch.equal, *found))
    assert region.moved_bytes == {"all": 2 * X, "inputs": X, "internals": X}[kind]


@each_kind
def test_a_tensor_that_the_first_forward_keeps(kind: OffloadKind) -> None:
    def rotate(module: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(module, "angles"):
            module.angles = torch.full((ROWS, WIDTH), 0.5)
        return (x * cast("Tensor", module.angles)).exp()

    region, body = Offloading(ledger=HostLedger(), kind=kind), Body(rotate)
    call = checkpointed(lambda x: region(body, body.forward, (x,), {}))
    for _ in range(2):
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        call(x).sum().backward()
        assert equal(x.grad, torch.full((ROWS, WIDTH), 0.5).exp() * 0.5)


@each_kind
def test_fake_tensors_compose_alike(kind: OffloadKind) -> None:
    real = Stages(lambda s: checkpointed(s.run(0, s.moved(kind, 1), 2)))
    gradients(real)
    with FakeTensorMode():
        fake = Stages(lambda s: checkpointed(s.run(0, s.moved(kind, 1), 2)))
        fake(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert fake.calls == real.calls
    assert fake.regions[0].moved_bytes == real.regions[0].moved_bytes
    assert fake.regions[0].fetched_bytes == real.regions[0].fetched_bytes


# A region inside other hooks

OUTER_AND_INNER: dict[tuple[OffloadKind, OffloadKind], tuple[int, int]] = {  # kinds -> X of each
    ("all", "all"): (3, 3),
    ("all", "inputs"): (5, 1),
    ("all", "internals"): (4, 2),
    ("inputs", "all"): (1, 3),
    ("inputs", "inputs"): (1, 1),
    ("inputs", "internals"): (1, 2),
    ("internals", "all"): (2, 3),
    ("internals", "inputs"): (4, 1),
    ("internals", "internals"): (3, 2),
}


@pytest.mark.parametrize("wrap", [lambda call: call, checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    ("kinds", "moved"), OUTER_AND_INNER.items(), ids=map("_around_".join, OUTER_AND_INNER)
)
def test_a_region_gives_the_rest_to_the_region_around_it(
    kinds: tuple[OffloadKind, OffloadKind], moved: tuple[int, int], wrap: Callable[[Call], Call]
) -> None:
    outer, inner = kinds
    model = Stages(lambda s: s.run(wrap(s.moved(outer, 0, s.moved(inner, 1))), 2))
    found = gradients(model)
    of_inner, of_outer = model.regions
    assert (of_outer.moved_bytes, of_inner.moved_bytes) == (moved[0] * X, moved[1] * X)
    assert model.ledger.offloaded_bytes == sum(moved) * X
    assert all(map(equal, found, gradients(Stages())))


@each_kind
def test_the_hooks_of_a_user_get_the_rest(kind: OffloadKind) -> None:
    body = Body(lambda m, x: ((x.sin() @ m.weight) * m.table).exp())
    region = Offloading(ledger=HostLedger(), kind=kind)
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> int:
        packed.append(saved.detach())
        return len(packed) - 1

    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with saved_tensors_hooks(pack, lambda index: packed[index]):
        outputs = region(body, body.forward, (x,), {})
    (actual,) = torch.autograd.grad(outputs.sum(), x)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    assert torch.equal(actual, expected)
    sizes = [tuple(tensor.shape) for tensor in packed]
    activation, weight = (ROWS, WIDTH), (WIDTH, WIDTH)
    assert (
        sizes
        == {
            "all": [],
            # the product's weight and input, the table, and the result
            "inputs": [weight, activation, activation, activation],
            "internals": [activation],
        }[kind]
    )


@each_kind
def test_composition_with_save_on_cpu(kind: OffloadKind) -> None:
    model = Stages(lambda s: s.run(0, s.moved(kind, 1), 2))
    with save_on_cpu():
        found = gradients(model)
    assert all(map(equal, found, gradients(Stages())))


# Counters


def test_counters_start_anew_with_the_first_forward_after_a_backward() -> None:
    model = Stages(lambda s: s.run(0, s.moved("inputs", 1), s.moved("internals", 2)))
    x = torch.ones(ROWS, WIDTH)
    for _ in range(2):
        outputs = model(x)
        assert [(r.moved_bytes, r.fetched_bytes) for r in model.regions] == [(X, 0), (2 * X, 0)]
        outputs = outputs + model(x)
        assert [r.moved_bytes for r in model.regions] == [2 * X, 4 * X]
        outputs.sum().backward()
        assert [(r.moved_bytes, r.fetched_bytes) for r in model.regions] == [(2 * X, 2 * X), (4 * X, 4 * X)]
        assert [r.observe().offloaded_bytes for r in model.regions] == [6 * X, 6 * X]


def test_a_storage_counts_for_the_region_that_moves_it_first() -> None:
    ledger, body = HostLedger(), Body(lambda _, x: x.sin())
    first, second = Offloading(ledger=ledger), Offloading(ledger=ledger, kind="inputs")
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    outputs = first(body, body.forward, (x,), {}) + second(body, body.forward, (x,), {})
    outputs.sum().backward()
    assert (first.moved_bytes, second.moved_bytes, ledger.offloaded_bytes) == (X, 0, X)


@each_kind
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_regions_shares_its_own_ledger_and_has_moved_nothing(
    kind: OffloadKind, duplicate: Any
) -> None:
    ledger, body = HostLedger(), Body(lambda _, x: x.sin().exp())
    regions = [Offloading(ledger=ledger, kind=kind) for _ in range(2)]
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    regions[0](body, body.forward, (x,), {}).sum().backward()
    twins = duplicate(regions)
    assert twins[0].ledger is twins[1].ledger is not ledger
    assert [(twin.kind, twin.moved_bytes, twin.fetched_bytes) for twin in twins] == [(kind, 0, 0)] * 2
    twins[0](body, body.forward, (x,), {}).sum().backward()
    assert twins[0].moved_bytes == regions[0].moved_bytes > 0


# Tensors written after they were saved

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda result: result.detach_().add_(1),
    "a view of it": lambda result: result.detach()[0].mul_(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", [None, *OFFLOAD_KINDS], ids=str)
def test_a_result_written_after_it_was_saved_is_refused(
    kind: OffloadKind | None, write: Callable[[Tensor], Any]
) -> None:
    body = Body(lambda _, x: x.exp())
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    if kind is None:
        result = body(x)
    else:
        result = Offloading(ledger=HostLedger(), kind=kind)(body, body.forward, (x,), {})
    loss = result.sum()
    write(result)
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    told = "one of the variables needed for gradient computation has been modified by an inplace operation: "
    if kind is None:  # what autograd itself says
        assert str(error.value).startswith(told)
        return
    assert str(error.value) == f"{told}[torch.float32 [8, 16]] is at version 1; expected version 0 instead."


@each_kind
def test_a_storage_written_between_two_saves_is_moved_anew(kind: OffloadKind) -> None:
    def function(_: nn.Module, x: Tensor) -> Tensor:
        hidden = x.detach() * 1
        unused = hidden * x  # saves it; no gradient flows
        hidden.mul_(2)
        return hidden * x + 0 * unused.detach()

    region, body = Offloading(ledger=HostLedger(), kind=kind), Body(function)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    region(body, body.forward, (x,), {}).sum().backward()
    assert equal(x.grad, torch.full((ROWS, WIDTH), 2.0))


def test_without_gradients_the_body_runs_as_it_is() -> None:
    region, body = Offloading(ledger=HostLedger()), Body(lambda _, x: x.exp())
    with torch.no_grad(), saved_tensors_hooks(lambda _: pytest.fail("saved"), lambda _: pytest.fail("read")):
        outputs = region(body, body.forward, (torch.ones(ROWS, WIDTH, requires_grad=True),), {})
    assert (outputs.requires_grad, region.moved_bytes) == (False, 0)
