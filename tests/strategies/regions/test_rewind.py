"""`ac.rewind`: what a block reads beside its inputs is put back for its recomputation, and restored after it.

Each case trains a model of three blocks with a stateful one in the middle. Without `rewind` it differs from
the plain model, in gradients or in the state that stays: that shows that the case could fail.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from strategies.ac.base import Recomputing
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.selective_op import SelectiveOp
from strategies.base import StrategyError
from strategies.estimate.anatomy import attributes, kind_of
from strategies.regions import rewind
from strategies.regions.rewind import SMALL_BYTES
from tests.gallery.parts import WIDTH, Layer, Net
from tests.gallery.users.cases import CASES
from tests.gallery.users.counters import Counting
from tests.gallery.users.randomness import Dropping
from tests.gallery.users.switches import Tempered
from tests.strategies.held_kinds import HELD

_STEPS = 3
_LARGE = SMALL_BYTES // 4 + WIDTH
_VARIANTS: dict[str, Callable[..., Recomputing | Nested]] = {
    "full": Full,
    "early stop off": partial(Full, early_stop=False),
    "reentrant": partial(Full, use_reentrant=True),
    "selective_op": SelectiveOp,
    "nested": Nested,
}


@dataclass
class _Counter:
    calls: int = 0
    seen: list[int] = field(default_factory=list)


class _Holding(Layer):
    """Scales by what `scale` makes of a value that it holds."""

    def __init__(self, held: Any, scale: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.scale = held, scale

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * (1 + self.scale(self.held)))


def _count(counter: Any) -> int:
    counter.calls += 1
    return int(counter.calls)


def _append(items: Any) -> int:
    items.append(1 + sum(items))
    return int(sum(items))


def _tally(counts: dict[str, int]) -> int:
    counts["calls"] = counts.get("calls", 0) + 1
    return counts["calls"]


def _grow(numbers: set[int]) -> int:
    numbers.add(len(numbers))
    return len(numbers)


def _step(array: np.ndarray[Any, Any]) -> float:
    array += 1
    return float(array[0])


def _decay(tensor: Tensor) -> Tensor:
    tensor.mul_(0.5)
    return tensor.clone()[:WIDTH]


def _nested(held: tuple[dict[str, list[Tensor]]]) -> Tensor:
    return _decay(held[0]["scales"][0])


def _changed(change: Callable[[Any], Any], held: Any) -> int:
    """Change what is held, and return a number of all that it was and has become."""
    before = zlib.crc32(_inside(held).encode())
    change(held)
    return before % 7


def _inside(held: Any) -> str:
    """Return what can be reached from `held`, as text without addresses."""
    kind = kind_of(held)
    parts = [] if kind is None else [*kind.parts(kind.read(held))]
    data = repr(kind.read(held)) if kind is not None and kind.form == "buffer" else type(held).__name__
    is_leaf = isinstance(held, int | str | FunctionType)
    own = {} if is_leaf else attributes(held)
    return (
        repr(held)
        if isinstance(held, int | str)
        else f"{data} {[(str(k), _inside(v)) for k, v in (*parts, *own.items())]}"
    )


_HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object": (_Counter, _count),
    "namespace": (lambda: SimpleNamespace(calls=0), _count),
    "list": (list, _append),
    "deque of a length": (lambda: deque([1, 2], maxlen=2), _append),
    "dictionary": (dict, _tally),
    "defaultdict": (lambda: defaultdict(int), _tally),
    "set": (set, _grow),
    "array": (lambda: np.ones(2), _step),
    "tensor": (lambda: torch.ones(WIDTH), _decay),
    "large tensor": (lambda: torch.ones(_LARGE), _decay),
    "tensor in a list in a dictionary in a tuple": (lambda: ({"scales": [torch.ones(WIDTH)]},), _nested),
    **{
        name: (HELD[name][0], partial(_changed, HELD[name][1]))
        for name in (
            *("counter", "slots", "private slot", "empty slot", "order of a dictionary", "bytearray", "deep"),
            *("list subclass", "attribute of a list subclass", "array of Python", "method of an object"),
            *("object that can be called", "dictionary subclass", "partial"),
        )
    },
    "generator of Python": (lambda: random.Random(0), lambda held: held.random()),
    "generator of NumPy": (lambda: np.random.default_rng(0), lambda held: held.random()),
    "old generator of NumPy": (lambda: np.random.RandomState(0), lambda held: held.rand()),
    "generator of torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda held: torch.rand(WIDTH, generator=held),
    ),
}
_OF_USERS = [  # whose state is put back
    *("Counting", "Tallying", "FirstCall", "RoundRobin", "Warmup", "StepInATensor", "LengthOfALog"),
    *("RandomGain", "CutMix ac=selective_op", "OwnGenerator", "PythonGenerator", "BatchNorm", "Whitened"),
    *("Codebook", "DelayedScaling ac=selective_op", "Spectral", "Balanced", "Remembering", "Logging"),
    *("SetsContext", "Cools"),
]


def _held(name: str) -> Net:
    make, scale = _HELD[name]
    return Net(Layer(), _Holding(make(), scale), Layer())


def _of_users(name: str) -> nn.Module:
    model: nn.Module = CASES[name].make()[0]
    return model


_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(_held, name) for name in _HELD},
    **{name: partial(_of_users, name) for name in _OF_USERS},
}


def _content(held: Any) -> str:
    """Return what `held` holds, or the state of a generator, as text without addresses."""
    for read in ("getstate", "get_state"):
        if hasattr(held, read):
            return str(_without_arrays(getattr(held, read)()))
    text = str(held.bit_generator.state if isinstance(held, np.random.Generator) else held)
    return _inside(held) if " at 0x" in text else text


def _without_arrays(state: object) -> object:
    """Return the state of a generator with bytes for arrays, whose text takes longer than a step."""
    if not isinstance(state, tuple):
        return state
    return [bytes(each) if isinstance(each, np.ndarray) else each for each in state]


def _state(model: nn.Module) -> object:
    """Return what stays after a step beside tensors' values: numbers, containers, generators."""
    held = [_content(vars(module)["held"]) for module in model.modules() if "held" in vars(module)]
    plain = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | list) and not name.startswith("_")
    ]
    buffers = [buffer.tolist() for buffer in model.buffers()]
    return str((held, plain, buffers)), random.getstate(), _without_arrays(np.random.get_state())  # noqa: NPY002


def _trained(make: Callable[[], nn.Module], ac: Recomputing | Nested | None = None) -> object:
    """Return outputs, gradients and state after each of three steps."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = make() if ac is None else ac.apply(make())
    inputs = torch.randn(4, WIDTH)
    found = []
    for step in range(_STEPS):
        torch.manual_seed(step)
        model.zero_grad()
        outputs = model(inputs)
        outputs.square().mean().backward()
        gradients = [
            parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None
        ]
        found.append((outputs.tolist(), gradients, _state(model)))
    return found


@pytest.fixture(autouse=True)
def _same_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002


@pytest.mark.parametrize("name", _MODELS)
def test_every_state_is_put_back_and_restored(name: str) -> None:
    make = _MODELS[name]
    plain = _trained(make)
    assert {
        variant: _trained(make, ac(layers_fqn="blocks", rewind=True)) == plain
        for variant, ac in _VARIANTS.items()
    } == dict.fromkeys(_VARIANTS, True)


@pytest.mark.parametrize("name", [name for name in _MODELS if name != "FirstCall"])
def test_each_of_them_differs_without(name: str) -> None:
    make = _MODELS[name]
    assert _trained(make, Full(layers_fqn="blocks")) != _trained(make)


def test_another_path_in_the_first_call_raises_without() -> None:
    with pytest.raises(CheckpointError):
        _trained(_MODELS["FirstCall"], Full(layers_fqn="blocks"))


@pytest.mark.parametrize("name", ["Counting", "Remembering", "Whitened", "large tensor"])
def test_two_forwards_may_wait_for_their_backward(name: str) -> None:
    def gradients(ac: Full | None) -> list[Any]:
        torch.manual_seed(0)
        model = _MODELS[name]() if ac is None else ac.apply(_MODELS[name]())
        losses = [model(torch.randn(4, WIDTH)).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, rewound in zip(
        gradients(None), gradients(Full(layers_fqn="blocks", rewind=True)), strict=True
    ):
        assert torch.equal(plain, rewound)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_graph_that_is_kept_is_recomputed_again(use_reentrant: bool) -> None:
    def gradients(ac: Full | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = _MODELS["Counting"]() if ac is None else ac.apply(_MODELS["Counting"]())
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    rewound = Full(layers_fqn="blocks", rewind=True, use_reentrant=use_reentrant)
    for plain, found in zip(gradients(None), gradients(rewound), strict=True):
        assert plain is not None
        assert found is not None
        assert torch.equal(plain, found)


def test_what_changes_between_forward_and_backward_is_put_back() -> None:
    def gradient(ac: Full | None) -> Tensor:
        torch.manual_seed(0)
        switched = Tempered()
        model: nn.Module = Net(switched, Dropping())
        model = model if ac is None else ac.apply(model)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        model.eval()
        switched.temperature = 3.0
        loss.backward()
        assert switched.temperature == 3.0, "the change stays"
        assert not model.training
        found: Tensor = switched.linear.weight.grad
        return found

    plain = gradient(None)
    assert torch.equal(plain, gradient(Full(layers_fqn="blocks", rewind=True)))
    with pytest.raises(CheckpointError):  # a dropout in eval saves nothing
        gradient(Full(layers_fqn="blocks"))


class _Rarely(Layer):
    """Changes a large buffer in its third call only."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(_LARGE))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        scale = self.table[:WIDTH].clone()
        if self.calls == 3:
            self.table.mul_(2)
        return super().forward(x * scale)


def test_a_large_tensor_that_changes_late_is_refused_once_and_copied_then() -> None:
    block = _Rarely()
    model = Full(layers_fqn="blocks", rewind=True).apply(Net(block))
    inputs = torch.randn(4, WIDTH)
    for _ in range(2):
        model(inputs).sum().backward()
    loss = model(inputs).sum()
    with pytest.raises(RuntimeError, match=r"ac.rewind: 'table' of \[16392\] changed in place"):
        loss.backward()
    block.calls = 2
    model(inputs).sum().backward()


def test_large_tensors_that_never_change_are_not_copied() -> None:
    model = Full(layers_fqn="blocks", rewind=True).apply(Net(_Rarely()))
    inputs = torch.randn(4, WIDTH)
    model(inputs).sum().backward()
    copied: list[int] = []

    class _Clones(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.clone.default:
                copied.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with _Clones():
        model(inputs).sum().backward()
    assert copied
    assert max(copied) < _LARGE


@pytest.mark.parametrize("variant", [Full, partial(Nested, levels=[3])], ids=["full", "nested"])
@pytest.mark.parametrize(("blocks", "notes"), [(Layer, 3), (Counting, 6)], ids=["no state", "state"])
def test_a_recomputation_notes_what_is_there_only_where_it_is_not_what_forward_found(
    blocks: type[nn.Module],
    notes: int,
    variant: Callable[..., Recomputing | Nested],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[nn.Module] = []
    note = rewind._State.of

    def counted(module: nn.Module, learned: rewind.Rewind) -> rewind._State:
        noted.append(module)
        return note(module, learned)

    monkeypatch.setattr(rewind._State, "of", counted)
    model = variant(layers_fqn="blocks", rewind=True).apply(Net(*(blocks() for _ in range(3))))
    model(torch.randn(4, WIDTH)).sum().backward()
    assert sum(isinstance(module, blocks) for module in noted) == notes


def _by_closure(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda inputs: plain(2.0 * inputs)


@pytest.mark.parametrize(
    "patch", [_by_closure, partial, lambda plain: plain], ids=["closure", "partial", "method"]
)
def test_the_copy_of_a_patched_block_rewinds_the_block_that_its_forward_runs(
    patch: Callable[[Any], Any],
) -> None:
    def make() -> nn.Module:
        model = _held("large tensor")
        block = model.blocks[1]
        block.forward = patch(block.forward)  # type: ignore[method-assign]
        return copy.deepcopy(model)

    assert _trained(make, Nested(layers_fqn="blocks")) == _trained(make)


def test_zeros_of_another_sign_are_put_back() -> None:
    def gradients(ac: Nested | None) -> list[Any]:
        torch.manual_seed(0)
        model: nn.Module = _flipping() if ac is None else ac.apply(_flipping())
        model(torch.ones(4, WIDTH)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, found in zip(gradients(None), gradients(Nested(layers_fqn="blocks")), strict=True):
        assert torch.equal(plain, found)


def _flipping() -> Net:
    return Net(Layer(), _Holding(torch.zeros(WIDTH), lambda held: (1 / held.neg_()).tanh()), Layer())


def test_nothing_leaks() -> None:
    model = Full(layers_fqn="blocks", rewind=True).apply(_held("tensor"))
    gc.collect()
    gc.disable()
    try:
        outputs = model(torch.randn(4, WIDTH))
        graph = weakref.ref(outputs)
        outputs.sum().backward()
        del outputs
        assert graph() is None
    finally:
        gc.enable()


def _grown(cache: Tensor, calls: int) -> Tensor:
    return torch.cat([cache, torch.full((3,), 2.0 + calls)])


def _resized(block: Any, size: int) -> None:
    before = len(block.cache)
    block.cache.resize_(size)[before:] = 2.0 + block.calls


SIZES: dict[str, Callable[[Any], object]] = {
    "grows with other memory": lambda m: setattr(m.cache, "data", _grown(m.cache, m.calls)),
    "grows where it is": lambda m: _resized(m, len(m.cache) + 3),
    "is set to another": lambda m: m.cache.set_(_grown(m.cache, m.calls)),
    "shrinks": lambda m: _resized(m, len(m.cache) - 1),
    "is another tensor": lambda m: setattr(m, "cache", _grown(m.cache, m.calls)),
    "has other memory of one size": lambda m: setattr(m.cache, "data", m.cache * 2),
}


class _Resizing(Layer):
    def __init__(self, resize: Callable[[Any], object], size: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(size))
        self.cache: Tensor
        self.calls, self.resize = 0, resize

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = super().forward(x) * self.cache.mean()
        self.resize(self)
        return y


@pytest.mark.parametrize("size", [8, _LARGE], ids=["small", "large"])
@pytest.mark.parametrize("resize", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("make", [_VARIANTS["full"], _VARIANTS["reentrant"], _VARIANTS["nested"]])
def test_a_buffer_that_later(make: Any, resize: Callable[[Any], object], size: int) -> None:
    plain = Net(Layer(), _Resizing(resize, size), Layer())
    model = make(layers_fqn="blocks", rewind=True).apply(copy.deepcopy(plain))
    for _ in range(_STEPS):
        gradients = []
        for each in (plain, model):
            each.zero_grad()
            each(torch.ones(2, WIDTH)).square().sum().backward()
            gradients.append([*(p.grad for p in each.parameters()), *each.buffers()])
        assert all(map(torch.equal, *gradients))


class _Dispatching(Layer):
    """Counts rows for each expert once, and keeps the counts for its recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.splits: list[int] = []
        self.counted = 0

    def forward(self, x: Tensor) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self.counted += 1
            self.splits.append(self.counted)
            return super().forward(x * self.counted)
        return super().forward(x * self.splits[-1])


class _NamesSplits(_Dispatching):
    acbench_not_rewound = ("splits",)


def _dispatched(block: Layer, make: Any) -> list[Tensor | None]:
    torch.manual_seed(0)
    plain = Net(Layer(), block, Layer())
    model = plain if make is None else make(layers_fqn="blocks", rewind=True).apply(plain)
    model(torch.ones(2, WIDTH)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("make", [_VARIANTS["full"], _VARIANTS["selective_op"], _VARIANTS["nested"]])
def test_what_a_module_keeps_for_its_recomputation_stays_if_it_is_named(make: Any) -> None:
    with pytest.raises(StrategyError) as error:
        _dispatched(_Dispatching(), make)
    assert str(error.value) == (
        "ac.rewind: the recomputation of a _Dispatching raises IndexError (list index out of range), and "
        "its forward did not; it finds the state that forward found: a module that keeps something for its "
        "recomputation has to name it, acbench_not_rewound = ('splits',)"
    )
    found, expected = _dispatched(_NamesSplits(), make), _dispatched(_NamesSplits(), None)
    assert all(map(torch.equal, found, expected))  # type: ignore[arg-type]
