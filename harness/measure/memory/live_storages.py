"""Live storages: which bytes a training step holds, by definition rather than by allocator.

The meter sees every operator below autograd and watches the storages of its results with weak references. It
works on CPU, CUDA, meta and fake tensors alike, and changes no operator.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from harness.measure.memory.ledger import Kind, Ledger, Life
from harness.measure.memory.locator import Locator
from harness.measure.patched import replaced
from harness.measure.tensors import (
    gradients_of,
    must_unwrap,
    parameters_of,
    plain_tensors,
    storage_key,
    tensors_in,
)

LARGEST_SAVED = 20
MOST_MOMENTS = 200

_aten = torch.ops.aten
# operators with which autograd's AccumulateGrad node makes a `.grad`; hooks of the node run others
_GRADIENT_MAKERS = frozenset({_aten.detach.default, _aten.clone.default, _aten.empty_strided.default})
# backward nodes whose formula reads the promoted number that forward has saved, and promotes none
_SCALAR_READERS = frozenset({"MulBackward0", "DivBackward0"})
# what a fake tensor is asked in the middle of an operator
_QUESTION = torch.ops.prim.device.default
_SCALAR_BYTES = {bool: 1, int: 8, float: 8, complex: 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStorage:
    """One storage that forward left for backward.

    Fields:
        bytes: its size.
        op, module: the operator that made it and the FQN of the module that ran the operator.
        shape, dtype: those of the operator's result.
    """

    bytes: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A part of the step: where, and the highest total of live storages there."""

    bytes: int
    phase: str
    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """The memory of one training step on one rank, in bytes of distinct storages.

    Fields:
        saved_bytes: storages made by forward (model and loss) that are alive when it has returned; without
            parameters, buffers, inputs, outputs and the loss. RNG states that checkpointing stashes count.
        peak_bytes: highest total on the device during the step, everything included.
        activation_peak_bytes: highest total of the storages made by forward and backward; without the
            gradients of parameters and FSDP's unsharded parameters.
        peak_phase, peak_module: where `peak_bytes` was first reached.
        parameter_bytes: storages of the parameters at the start of the step (this rank's shards).
        gradient_bytes: storages of the gradients when backward has returned.
        optimizer_bytes: storages of the optimizer's state at the end of the step.
        host_peak_bytes: highest total of storages off the device; on CPU, of what a strategy declares host
            memory.
        largest_saved: the largest of the saved storages, largest first, at most 20.
        saved_by_module: saved bytes by the module that made them.
        timeline: highest total on the device in each stay in a module, in order of time; of a long step, the
            highest of neighbouring stays, at most 200 in all.
    """

    saved_bytes: int
    peak_bytes: int
    activation_peak_bytes: int
    peak_phase: str
    peak_module: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_peak_bytes: int
    largest_saved: tuple[SavedStorage, ...] = ()
    saved_by_module: dict[str, int] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()


class WorkspaceProbe(Protocol):
    """Tells how much memory an operator held that is neither there before it nor after it."""

    def begin(self) -> None:
        """Start to watch; called right before the operator."""

    def excess_bytes(self) -> int:
        """Return the bytes above both ends since `begin`; called right after the operator."""


class LiveStorages(TorchDispatchMode):
    """Watches all storages from `__enter__` to `__exit__`; the results are in `ledger`.

    Args:
        locator: says where in the step an operator runs.
        device: the type of the device that computes; storages elsewhere are host memory.
        is_host: whether what is allocated now is a host copy although `device` is the CPU.
        probe: if given, each operator's private memory is entered into the ledger.
    """

    def __init__(
        self,
        locator: Locator,
        *,
        device: str,
        is_host: Callable[[], bool],
        probe: WorkspaceProbe | None = None,
    ) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._locator = locator
        self._device = device
        self._numbers_on_host = device not in ("cpu", "meta")
        self._is_host = is_host
        self._probe = probe
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._scalars: list[_Scalar] = []
        self._seen_late: set[int] = set()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for owner in (torch, torch.random, torch.cuda, torch.cuda.random):
            watched = self._watching_rng_state(owner.get_rng_state)
            self._patches.enter_context(replaced(owner, "get_rng_state", watched))
        watched = self._watching_resize(torch.UntypedStorage.resize_)
        self._patches.enter_context(replaced(torch.UntypedStorage, "resize_", watched))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: object) -> None:
        self._settle_scalars()
        alive = {number for number, _ in self._live.values()}
        self.ledger.mark(self._seen_late - alive, Kind.BACKEND)
        self._live.clear()  # and with the weak references their callbacks
        self._patches.close()
        super().__exit__(*exc)

    def stand(self, tensors: Iterable[Tensor]) -> set[int]:
        """Enter the unknown storages of plain `tensors` as there before the step; return their numbers."""
        unknown = (t for t in tensors if storage_key(t) not in self._live)
        return {self._enter_standing(tensor) for tensor in unknown}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers in the ledger of those storages of plain `tensors` that are known."""
        keys = map(storage_key, tensors)
        return {self._live[key][0] for key in keys if key in self._live}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` and enter what it made."""
        if must_unwrap(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is _QUESTION:
            return func(*args, **kwargs)
        self._settle_scalars()
        if func is not _aten.lift_fresh.default:  # whose operand `torch.tensor` has just made
            # DDP's buckets stood unseen; what dies before the step ends, gloo made for itself
            self._seen_late |= self.stand(plain_tensors(tensors_in((args, kwargs))))
        if self._probe is not None:
            self._probe.begin()
        result = func(*args, **kwargs)
        excess_bytes = self._probe.excess_bytes() if self._probe is not None else 0
        results = list(plain_tensors(tensors_in(result)))
        for tensor in results:
            self._enter_result(tensor, str(func))
        if self._locator.is_accumulating and func in _GRADIENT_MAKERS:
            self.ledger.mark(self.numbers(results), Kind.GRADIENT)
        numbers = _promoted(func, args)
        if self._locator.node not in _SCALAR_READERS or self._locator.is_recomputing:
            self._enter_scalars(str(func), numbers, results)
        self._enter_workspace(str(func), excess_bytes - self._promoted_again_bytes(numbers))
        return result

    def _life(self, tensor: Tensor, *, op: str, kind: Kind = Kind.CREATED) -> Life:
        standing = kind is Kind.STANDING
        return Life(
            nbytes=tensor.untyped_storage().nbytes(),
            op=op,
            module="" if standing else self._locator.module,
            phase="" if standing else self._locator.phase,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            on_host=tensor.device.type != self._device or self._is_host(),
            kind=kind,
        )

    def _enter_standing(self, tensor: Tensor) -> int:
        number = self.ledger.stand(self._life(tensor, op="", kind=Kind.STANDING))
        self._follow(tensor.untyped_storage(), number)
        return number

    def _stand_storage(self, storage: torch.UntypedStorage) -> None:
        """Enter the storage of a sharded parameter, which is empty and hidden until FSDP fills it."""
        if storage._cdata in self._live:  # noqa: SLF001 (its identity)
            return
        here = storage.device.type in (self._device, "meta")  # the storage of a fake tensor is a meta one
        life = Life(nbytes=storage.nbytes(), on_host=not here or self._is_host(), kind=Kind.STANDING)
        self._follow(storage, self.ledger.stand(life))

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata  # noqa: SLF001 (its identity)
        self._live[key] = number, weakref.ref(storage, functools.partial(self._bury, key))

    def _bury(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        number, _ = self._live.pop(key)
        self._resize(number, 0)

    def _resize(self, number: int, nbytes: int) -> None:
        self.ledger.resize(number, nbytes, phase=self._locator.phase, module=self._locator.module)

    def _enter_result(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)  # noqa: SLF001 (its identity)
        if known is None:
            self._follow(storage, self.ledger.bear(self._life(tensor, op=op)))
        else:
            self._resize(known[0], storage.nbytes())

    def _enter_scalars(self, op: str, numbers: list[tuple[str, Any]], results: list[Tensor]) -> None:
        """Enter the 0-dimensional CPU tensors that torch makes of Python numbers given for tensors."""
        for name, value in numbers:
            number = self.ledger.bear(
                Life(
                    nbytes=_SCALAR_BYTES[type(value)],
                    op=op,
                    module=self._locator.module,
                    phase=self._locator.phase,
                    dtype=type(value).__name__,
                    on_host=self._numbers_on_host,
                    kind=Kind.CREATED,
                )
            )
            self._scalars.append(_Scalar(number, name, TensorWeakRef(results[0])))

    def _promoted_again_bytes(self, numbers: list[tuple[str, Any]]) -> int:
        """Return what the probe saw of `numbers`: a call from Python promotes them once more."""
        return 0 if self._numbers_on_host else sum(_SCALAR_BYTES[type(number)] for _, number in numbers)

    def _settle_scalars(self) -> None:
        """Bury the promoted numbers of the operator before, except those that autograd has saved since."""
        for scalar in self._scalars:
            saved = scalar.saved()
            if saved is None:
                self._resize(scalar.number, 0)
            else:
                self._follow(saved.untyped_storage(), scalar.number)
        self._scalars.clear()

    def _enter_workspace(self, op: str, nbytes: int) -> None:
        if nbytes > 0:
            phase, module = self._locator.phase, self._locator.module
            life = Life(nbytes=nbytes, op=op, kind=Kind.WORKSPACE, phase=phase, module=module)
            self.ledger.resize(self.ledger.bear(life), 0, phase=phase, module=module)

    def _watching_rng_state(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
            state = original(*args, **kwargs)
            self._enter_result(state, "torch.get_rng_state")
            return state

        return get_rng_state

    def _watching_resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            self._stand_storage(storage)
            result = original(storage, size)
            self._resize(self._live[storage._cdata][0], storage.nbytes())  # noqa: SLF001 (its identity)
            return result

        return resize_


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A promoted number: the argument it stands for, and the result whose autograd node may have saved it."""

    number: int
    argument: str
    result: TensorWeakRef

    def saved(self) -> Tensor | None:
        result = self.result()
        # the node of a view would be made anew by asking for it
        if result is None or result._is_view():  # noqa: SLF001 (no public name)
            return None
        # reading cannot trigger a hook: autograd packs no promoted number
        saved = getattr(result.grad_fn, f"_saved_{self.argument}", None)
        return saved if isinstance(saved, Tensor) else None


def _promoted(func: Any, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    numbers = [index for index, value in enumerate(args) if type(value) in _SCALAR_BYTES]
    if not numbers:
        return []
    names = _tensor_arguments(func)
    return [(names[index], args[index]) for index in numbers if index in names]


@functools.cache
def _tensor_arguments(func: Any) -> dict[int, str]:
    """Return position and name of the arguments that the schema of `func` calls tensors."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    arguments = [] if schema is None else schema.arguments
    return {i: a.name for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")}


def is_saved(life: Life) -> bool:
    """Tell whether a storage that lives at the end of forward counts as saved for backward."""
    return life.phase == "forward" and life.kind is Kind.CREATED and not life.on_host and life.nbytes > 0


def is_activation(life: Life) -> bool:
    """Tell whether a storage counts as an activation of forward or backward."""
    return (
        life.phase in ("forward", "backward")
        and life.kind in (Kind.CREATED, Kind.OUTPUT)
        and not life.on_host
    )


def is_on_device(life: Life) -> bool:
    """Tell whether a storage of the step lies on the device."""
    return not life.on_host and is_storage(life)


def is_on_host(life: Life) -> bool:
    """Tell whether a storage lies in host memory while the model computes elsewhere."""
    return life.on_host and is_storage(life)


def is_storage(life: Life) -> bool:
    """Tell storages from the private memory of kernels and of communication backends."""
    return life.kind not in (Kind.WORKSPACE, Kind.BACKEND)


def saved_storages(ledger: Ledger) -> list[SavedStorage]:
    """Return what forward has left, largest first; call it when forward has returned."""
    lives = sorted(filter(is_saved, ledger.lives), key=lambda life: -life.nbytes)
    return [
        SavedStorage(bytes=life.nbytes, op=life.op, module=life.module, shape=life.shape, dtype=life.dtype)
        for life in lives
    ]


def timeline(ledger: Ledger) -> tuple[Moment, ...]:
    """Return the step in order of time; where there are too many stays, the highest of neighbours."""
    stays = ledger.timeline(is_on_device)
    width = math.ceil(len(stays) / MOST_MOMENTS) or 1
    highest = [
        max(stays[start : start + width], key=lambda stay: stay.nbytes)
        for start in range(0, len(stays), width)
    ]
    return tuple(Moment(bytes=stay.nbytes, phase=stay.phase, module=stay.module) for stay in highest)


def by_module(saved: Iterable[SavedStorage]) -> dict[str, int]:
    """Return the saved bytes of each module."""
    total: Counter[str] = Counter()
    for storage in saved:
        total[storage.module] += storage.bytes
    return dict(total)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of plain `tensors`."""
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def mark_forward(live: LiveStorages, model: nn.Module, outputs: Any) -> None:
    """Tell returned tensors and unsharded parameters from what was saved."""
    live.ledger.mark(live.numbers(tensors_in(outputs)), Kind.OUTPUT)
    live.ledger.mark(live.numbers(parameters_of(model)), Kind.PARAMETER)


def mark_backward(live: LiveStorages, model: nn.Module) -> None:
    """Tell the gradients of parameters from activations."""
    live.ledger.mark(live.numbers(gradients_of(model)), Kind.GRADIENT)
