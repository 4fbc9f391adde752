"""Saved values that are made again when they are read, and not when autograd asks for them.

A node of autograd asks for all that it has saved before it computes anything. That of a product reads one
factor for one gradient, and then the other for the other. That of a power reads its base in the first of
three operators. Such nodes get a `LateValue` for each, so that the first factor is gone when the second is
made, and the base when two of the three run: a tensor without memory that becomes the value in the operator
that reads it. Each costs some tens of microseconds, so only products get them whose factors are both large.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction

from strategies.base import StrategyError
from strategies.regions.saved_tensors import Hooks, hooks_around
from strategies.regions.split_backward import runs_again
from strategies.regions.versions import Version, alias_of_plain
from strategies.step.memory_layout import MemoryLayout
from strategies.step.operator_mode import OperatorMode

_DETACH = torch.ops.aten.detach.default
_PRODUCT = torch.ops.aten.mul.Tensor
_OF_ONE = frozenset(
    {torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.sin.default, torch.ops.aten.cos.default}
)
READS_ONCE = _OF_ONE | {_PRODUCT}
"""Operators whose nodes read each saved value in one operator, which is one of these, and run more."""

_mode_at = torch._C._get_dispatch_stack_at  # noqa: SLF001 (no public way)
_FACTORS = 2
_MOST_UNLIKE = 4
"""Times that one factor may be as large as the other."""


class MayBeLate(Protocol):
    """Something that autograd has saved. `is_late`: whether backward reads it later than it asks for it."""

    is_late: bool

    @property
    def layout(self) -> MemoryLayout:
        """Return its place in its storage."""


class JustSaved:
    """Own values of a block that autograd has saved since the last operator.

    Autograd saves the factors of a product before the product runs, so that the operator tells what they are.
    Capture and executor decide by it alike: what one foresees, the other does.

    Args:
        identify: returns the identity of a tensor's storage.

    Attributes:
        values: they, each with the identity of its storage.
    """

    __slots__ = ("_hooks", "_identify", "values")

    def __init__(self, identify: Callable[[Tensor], int | None]) -> None:
        self._identify = identify
        self._hooks: Hooks | None = None
        self.values: list[tuple[MayBeLate, int]] = []

    def add(self, saved: MayBeLate, identity: int) -> None:
        """Take note of what was saved, with the identity of its storage."""
        self._hooks = hooks_around()
        self.values.append((saved, identity))

    def clear(self) -> None:
        """Hold nothing more: the hooks may hold who holds this."""
        self.values.clear()
        self._hooks = None

    def before(self, func: Any, args: Sequence[Any]) -> None:
        """Mark what backward reads late, if the node of an operator that runs now reads it once.

        What a checkpoint in a block saves, its own hooks get; those of the block get its inputs.
        """
        if not self.values:
            return
        factors = factors_of(func, args) if self._hooks == hooks_around() else []
        latest = self.values[-len(factors) :]
        self.values.clear()
        if factors and are_large([saved.layout for saved, _ in latest]):
            identities = [self._identify(each) for each in factors]
            if Counter(identities) == Counter(identity for _, identity in latest):
                for saved, _ in latest:
                    saved.is_late = True


def factors_of(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return both factors of a product, or what another operator of `READS_ONCE` reads; else nothing.

    Args:
        func: the operator that runs now.
        args: its operands; nothing is returned unless autograd has saved all of them for it.
    """
    if func not in READS_ONCE or not torch.is_grad_enabled():
        return []
    factors = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
    return factors if len(factors) == (_FACTORS if func is _PRODUCT else 1) else []


def are_large(saved: Sequence[MemoryLayout]) -> bool:
    """Say whether values of a node are worth reading late, by their layouts: none is much smaller."""
    if not saved or not all(each.is_plain for each in saved):
        return False
    elements = [each.size.numel() for each in saved]
    return min(elements) * _MOST_UNLIKE >= max(elements)


def given(redeem: Callable[[], Tensor], layout: MemoryLayout, device: torch.device) -> Tensor:
    """Return what becomes a saved value when it is read.

    That is the value itself for a node that records what it does, for gradients of gradients; in a gradient
    that the forward of a block takes; where a mode of others would not see what runs to make it; and where a
    compiler looks at what nodes get.
    """
    if torch.is_grad_enabled() or not _may_be_late() or _is_compiled():
        return redeem()
    return LateValue(_Ticket(redeem), layout, device)


def _may_be_late() -> bool:
    """Say whether all modes step aside for wrappers, and none counts the operators of a forward."""
    modes = [_mode_at(place) for place in range(torch._C._len_torch_dispatch_stack())]  # noqa: SLF001 (no public way)
    return all(
        not mode.is_of_forward if isinstance(mode, OperatorMode) else isinstance(mode, FakeTensorMode)
        for mode in modes
    )


def _is_compiled() -> bool:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


class _Ticket:
    """The state that late values of one saved value share: it is redeemed once."""

    __slots__ = ("_redeem", "_value")

    def __init__(self, redeem: Callable[[], Tensor]) -> None:
        self._redeem = redeem
        self._value: Tensor | None = None

    def value(self, *, stays: bool) -> Tensor:
        """Return the value, and keep it for other readers where it stays."""
        value = self._redeem() if self._value is None else self._value
        self._value = value if stays else None
        return value


def second_backward() -> StrategyError:
    """Return the refusal of what is redeemed once more."""
    problem = "backward runs a second time through a block whose plan has let go of what it needs"
    return StrategyError("ac", f"{problem}; use ac=full for backward with retain_graph or create_graph")


class AskedAgain:
    """A value that a node in Python was given, which has it until autograd lets go of the node's tickets.

    Each look at `ctx.saved_tensors` asks for all that the function has saved. Nodes of torch ask once.
    """

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: tuple[int, Version] | None = None

    def value(self) -> Tensor | None:
        """Return the value, if it was given in the backward that runs.

        Raises:
            RuntimeError: the function has written to it since, in the words of autograd.
        """
        if self._given is None or self._given[0] != torch._C._current_graph_task_id():  # noqa: SLF001 (no public way)
            return None
        version = self._given[1]
        version.refuse_past(version.counter)
        return version.counter

    def give(self, value: Tensor) -> None:
        """Take note of what a node is given."""
        node = torch._C._current_autograd_node()  # noqa: SLF001 (no public way)
        if isinstance(node, BackwardCFunction):
            expected = value._version  # noqa: SLF001 (as autograd checks it)
            self._given = torch._C._current_graph_task_id(), Version(value, expected)  # noqa: SLF001 (as above)


class KeptTicket(AskedAgain):
    """Redeemed for a plain tensor that is kept as it is, by one node in each part of a backward.

    Attributes:
        is_late: whether backward reads the value later than it asks for it.
    """

    __slots__ = ("_expected", "_tensor", "is_late")

    def __init__(self, saved: Tensor) -> None:
        super().__init__()
        self._tensor: Tensor | None = alias_of_plain(saved)
        self._expected = saved._version  # noqa: SLF001 (as autograd checks it)
        self.is_late = False

    @property
    def layout(self) -> MemoryLayout:
        """The layout of the tensor, until it is redeemed."""
        assert self._tensor is not None, "it has not been redeemed"
        return MemoryLayout.of(self._tensor, self._tensor)

    def __call__(self) -> Tensor:
        """Return what backward gets.

        Raises:
            StrategyError: it was redeemed before.
            RuntimeError: the tensor was written to in place, in the words of autograd.
        """
        tensor = self._tensor
        if tensor is None or not self.is_late:
            del tensor
            return self._redeem()
        layout, device = self.layout, tensor.device
        del tensor
        return given(self._redeem, layout, device)

    def _redeem(self) -> Tensor:
        tensor = self._tensor
        if not runs_again():
            self._tensor = None
        if tensor is None:
            tensor = self.value()
            if tensor is None:
                raise second_backward()
            return tensor
        if tensor._version != self._expected:  # noqa: SLF001 (as autograd checks it)
            Version(tensor, self._expected).refuse_past(tensor)
        self.give(tensor)
        return tensor


class LateValue(Tensor):
    """A tensor without memory; the operator that reads it gets what it stands for."""

    ticket: _Ticket
    like: MemoryLayout

    @staticmethod
    def __new__(cls: type[Self], ticket: _Ticket, layout: MemoryLayout, device: torch.device) -> Self:
        """Return a tensor that looks like the value."""
        late: Self = Tensor._make_wrapper_subclass(  # noqa: SLF001 (its name)
            cls, layout.size, strides=layout.stride, dtype=layout.dtype, device=device
        )
        late.ticket, late.like = ticket, layout
        return late

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Say that it wraps no tensor: modes take it for a wrapper, and see what runs in its place."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Tensor:
        """Refuse: nothing is known of the value."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no func
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` on the values; one that is read once is gone with it."""
        if func is _DETACH:  # autograd takes so what it is given
            return cls(args[0].ticket, args[0].like, args[0].device)

        stays = func not in READS_ONCE
        given_args = [_value(each, stays=stays) for each in args]
        return func(*given_args, **{name: _value(each, stays=stays) for name, each in (kwargs or {}).items()})


def _value(argument: Any, *, stays: bool) -> Any:
    """Return an argument with values in place of what stands for them."""
    if isinstance(argument, LateValue):
        return argument.ticket.value(stays=stays)
    if isinstance(argument, list | tuple):
        return [_value(each, stays=stays) for each in argument]
    return argument
