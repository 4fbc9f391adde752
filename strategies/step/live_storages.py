"""Live storages: which bytes a training step holds, by definition rather than by allocator.

The meter sees every operator below autograd and follows the storages of its results with weak references. It
works on CPU, CUDA, meta and fake tensors alike, and changes no operator. Trials and rehearsals of plans use
it, so a prediction counts what a measurement counts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from strategies.estimate.host import allocating_on_host
from strategies.estimate.liveness import NUMBER_BYTES, hidden_bytes, key_of, numbers_bytes, promoted_numbers
from strategies.estimate.patched import replaced
from strategies.estimate.tensors import dtype_name, plain_tensors_in
from strategies.step.ledger import Kind, Ledger, Life
from strategies.step.operator_facts import facts_of
from strategies.step.operator_mode import OperatorMode
from strategies.step.position import Position

_aten = torch.ops.aten
# operators with which autograd's AccumulateGrad node makes a `.grad`; hooks of the node run others
_GRADIENT_MAKERS = frozenset({_aten.detach.default, _aten.clone.default, _aten.empty_strided.default})
# backward nodes whose formula reads the promoted number that forward has saved, and promotes none
_NUMBER_READERS = frozenset({"MulBackward0", "DivBackward0"})
RANDOM_STATE = "torch.get_rng_state"
"""What makes the state of a random generator, as the ledger names it."""


class WorkspaceProbe(Protocol):
    """Tells how much memory an operator held that is neither there before it nor after it."""

    def begin(self) -> None:
        """Start to watch; called right before the operator."""

    def excess_bytes(self) -> int:
        """Return the bytes above both ends since `begin`; called right after the operator."""


class Touched(NamedTuple):
    """Plain tensors that an operator was given, and that it returned."""

    operands: Sequence[Tensor]
    results: Sequence[Tensor]


class LiveStorages(OperatorMode):
    """Watches all storages from `__enter__` to `__exit__`; the results are in `ledger`.

    Args:
        position: says where in the step an operator runs.
        device: the type of the device that computes; storages elsewhere, and those made under
            `host.host_allocation`, are host memory.
        probe: if given, each operator's private memory is entered into the ledger.
    """

    def __init__(
        self,
        position: Position,
        *,
        device: str,
        probe: WorkspaceProbe | None = None,
    ) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._position = position
        self._device = device
        self._numbers_on_host = device not in ("cpu", "meta")
        self._probe = probe
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._promoted: list[_Promoted] = []
        self._hidden_bytes: dict[int, int] = {}
        self._seen_late: set[int] = set()
        self._source = ""
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Watch what makes or resizes storages without an operator, too."""
        for owner in (torch, torch.random, torch.cuda, torch.cuda.random):
            watched = self._watching_rng_state(owner.get_rng_state)
            self._patches.enter_context(replaced(owner, "get_rng_state", watched))
        watched = self._watching_resize(torch.UntypedStorage.resize_)
        self._patches.enter_context(replaced(torch.UntypedStorage, "resize_", watched))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: object) -> None:
        """Settle what is open, and let go of everything that is alive."""
        self._settle_numbers()
        alive = {number for number, _ in self._live.values()}
        self.ledger.mark(self._seen_late - alive, Kind.BACKEND)
        self._live.clear()  # and with the weak references their callbacks
        self._patches.close()
        super().__exit__(*exc)

    def add_standing(self, tensors: Iterable[Tensor]) -> set[int]:
        """Enter the unknown storages of plain `tensors` as there before the step; return their numbers."""
        unknown = (t for t in tensors if key_of(t) not in self._live)
        return {self._enter_standing(tensor) for tensor in unknown}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers in the ledger of those storages of plain `tensors` that are known."""
        keys = map(key_of, tensors)
        return {self._live[key][0] for key in keys if key in self._live}

    def number(self, tensor: Tensor) -> int | None:
        """Return the number in the ledger of the storage of a plain tensor; `None` of an unknown one."""
        known = self._live.get(key_of(tensor))
        return None if known is None else known[0]

    def add_made(self, tensor: Tensor, op: str) -> None:
        """Enter the storage of a plain tensor that `op` has just made outside of dispatch."""
        self._source = self._position.source
        self._enter_result(tensor, op)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and enter what it made."""
        return self.followed(func, args, kwargs)[0]

    def followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Touched]:
        """Run `func` and enter what it made; return its result and the plain tensors that it touched."""
        self._settle_numbers()
        self._source = self._position.source
        operands = plain_tensors_in((args, kwargs))
        if func is not _aten.lift_fresh.default:  # whose operand `torch.tensor` has just made
            # DDP's buckets stood unseen; what dies before the step ends, gloo made for itself
            self._seen_late |= self.add_standing(operands)
        if self._probe is not None:
            self._probe.begin()
        result = func(*args, **kwargs)
        excess_bytes = 0 if self._probe is None else self._probe.excess_bytes()
        results = plain_tensors_in(result)
        self._enter_results(func, args, results)
        if excess_bytes > 0:
            # a call from Python promotes numbers once more, which the probe has seen
            promoted_bytes = 0 if self._numbers_on_host else numbers_bytes(func, args)
            self._enter_workspace(str(func), excess_bytes - promoted_bytes)
        return result, Touched(operands, results)

    def _enter_results(self, func: Any, args: tuple[Any, ...], results: Sequence[Tensor]) -> None:
        name, is_view = facts_of(func).name, getattr(func, "is_view", False)
        for tensor in results:
            hidden = functools.partial(hidden_bytes, func, tensor, args)
            self._enter_result(tensor, name, hidden, is_view=is_view)
        if self._position.is_accumulating and func in _GRADIENT_MAKERS:
            self.ledger.mark(self.numbers(results), Kind.GRADIENT)
        if self._position.is_accumulating and func is _aten.add_.Tensor:  # to that of a micro-batch before
            self.ledger.mark(self.numbers(plain_tensors_in(args[1:2])), Kind.GRADIENT)
        numbers = promoted_numbers(func, args)
        if numbers and (self._position.node not in _NUMBER_READERS or self._position.is_recomputing):
            self._enter_numbers(name, numbers, results[0])

    def _enter_standing(self, tensor: Tensor) -> int:
        """Enter a storage that was there before the step; return its number."""
        storage = tensor.untyped_storage()
        life = Life(
            nbytes=storage.nbytes(),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            on_host=self._lies_on_host(tensor.device.type),
            kind=Kind.STANDING,
        )
        number = self.ledger.add_standing(life)
        self._follow(storage, number)
        return number

    def _enter_hidden(self, storage: torch.UntypedStorage) -> None:
        """Enter the storage of a sharded parameter, which is empty and hidden until FSDP fills it."""
        if storage._cdata in self._live:  # noqa: SLF001 (its identity)
            return
        # the storage of a fake tensor is a meta one
        device = self._device if storage.device.type == "meta" else storage.device.type
        life = Life(nbytes=storage.nbytes(), on_host=self._lies_on_host(device), kind=Kind.STANDING)
        self._follow(storage, self.ledger.add_standing(life))

    def _lies_on_host(self, device: str) -> bool:
        return device != self._device or allocating_on_host()

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata  # noqa: SLF001 (its identity)
        self._live[key] = number, weakref.ref(storage, functools.partial(self._on_freed, key))

    def _on_freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        number, _ = self._live.pop(key)
        is_known = isinstance(self.ledger.lives[number].nbytes, int)
        if is_known:  # a size that depends on data is refused elsewhere
            self._resize(number, 0)

    def _resize(self, number: int, nbytes: int) -> None:
        self.ledger.resize(number, nbytes, phase=self._position.phase, module=self._position.module)

    def _enter_result(
        self, tensor: Tensor, op: str, hidden: Callable[[], int] = lambda: 0, *, is_view: bool = False
    ) -> None:
        """Enter the storage of a result, or its new size.

        Args:
            hidden: returns what a storage without memory lacks of the real one.
            is_view: whether it lies on the storage of an operand.
        """
        storage = tensor.untyped_storage()
        known, is_fake = self._live.get(storage._cdata), storage.device.type == "meta"  # noqa: SLF001 (identity)
        if known is not None:
            nbytes = self.ledger.lives[known[0]].nbytes
            if is_view and is_fake and isinstance(nbytes, int) and not nbytes:  # data may decide about others
                storage.resize_(0)  # a view of a fake tensor brings back the memory that FSDP has freed
            self._resize(known[0], storage.nbytes() + self._hidden_bytes.get(known[0], 0))
            return
        hidden_bytes = hidden() if is_fake else 0
        number = self._enter_made(
            storage.nbytes() + hidden_bytes,
            op,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            on_host=self._lies_on_host(tensor.device.type),
        )
        if hidden_bytes:
            self._hidden_bytes[number] = hidden_bytes
        self._follow(storage, number)

    def _enter_numbers(self, op: str, numbers: list[tuple[str, Any]], result: Tensor) -> None:
        """Enter the 0-dimensional CPU tensors that torch makes of Python numbers given for tensors."""
        for argument, value in numbers:
            number = self._enter_made(
                NUMBER_BYTES[type(value)], op, dtype=type(value).__name__, on_host=self._numbers_on_host
            )
            self._promoted.append(_Promoted(number, argument, TensorWeakRef(result)))

    def _enter_made(self, nbytes: int, op: str, kind: Kind = Kind.CREATED, **details: Any) -> int:
        """Enter a storage that `op` has made where the step is now; return its number."""
        phase, module = self._position.phase, self._position.module
        life = Life(
            nbytes=nbytes, op=op, kind=kind, phase=phase, module=module, source=self._source, **details
        )
        return self.ledger.add(life)

    def _settle_numbers(self) -> None:
        """End the promoted numbers of the operator before, except those that autograd has saved since."""
        for promoted in self._promoted:
            saved = promoted.saved()
            if saved is None:
                self._resize(promoted.number, 0)
            else:
                self._follow(saved.untyped_storage(), promoted.number)
        self._promoted.clear()

    def _enter_workspace(self, op: str, nbytes: int) -> None:
        if nbytes > 0:
            self._resize(self._enter_made(nbytes, op, Kind.WORKSPACE), 0)

    def _watching_rng_state(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a `get_rng_state` whose result is entered: it is made where no operator is seen."""

        @functools.wraps(original)
        def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
            state = original(*args, **kwargs)
            self.add_made(state, RANDOM_STATE)
            return state

        return get_rng_state

    def _watching_resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `resize_` of storages that is entered, as FSDP calls it."""

        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            self._enter_hidden(storage)
            result = original(storage, size)
            self._resize(self._live[storage._cdata][0], storage.nbytes())  # noqa: SLF001 (its identity)
            return result

        return resize_


@dataclass(frozen=True, slots=True)
class _Promoted:
    """A Python number of which torch has made a tensor.

    Fields:
        number: number of its storage in the ledger.
        argument: name of the argument that it stands for.
        result: result of the operator; its autograd node may have saved the tensor.
    """

    number: int
    argument: str
    result: TensorWeakRef

    def saved(self) -> Tensor | None:
        """Return the promoted number as autograd has saved it, `None` where it has not."""
        result = self.result()
        # the node of a view would be made anew by asking for it
        if result is None or result._is_view():  # noqa: SLF001 (no public name)
            return None
        # reading cannot trigger a hook: autograd packs no promoted number
        saved = getattr(result.grad_fn, f"_saved_{self.argument}", None)
        return saved if isinstance(saved, Tensor) else None
