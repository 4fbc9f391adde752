"""A dispatch mode that notes operators, and of a forward whose order it knows no more than it has to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import CodeType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from strategies.estimate.liveness import key_of
from strategies.regions.versions import PLAIN
from strategies.step.late_value import READS_ONCE, JustSaved
from strategies.step.memory_layout import dense_of
from strategies.step.operator_facts import fake_mode, is_numbered
from strategies.step.operator_mode import OperatorMode
from strategies.step.operator_order import DETACH, LIFT, PASSED, Entry, OperatorOrder, OrderWriter

_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001 (no public way)
_mode_of = torch._C._get_dispatch_mode  # noqa: SLF001 (as above)


class Pause:
    """Tells the tape of a block that what runs is no part of the block's forward; it nests.

    Attributes:
        is_on: whether what runs now is none.
        made_again: takes a content and what a ticket gives for it, while forward runs; `None` afterwards.
    """

    __slots__ = ("_outer", "is_on", "made_again")

    def __init__(self) -> None:
        self.is_on = False
        self.made_again: Callable[[Any, Tensor], None] | None = None
        self._outer: list[bool] = []

    def __enter__(self) -> None:
        self._outer.append(self.is_on)
        self.is_on = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_on = self._outer.pop()


class OrderedMode(OperatorMode):
    """Gives operators to `note`; those of a known order that have to be noted, to `note_ordered`.

    Attributes:
        is_in_order: whether forward follows the order of an earlier call, or has done so until it ended.
        order: the order of this call, once it has ended as it was planned, where it was taken down.
    """

    is_of_forward = True

    def __init__(self) -> None:
        super().__init__()
        self.is_in_order = False
        self.order: OperatorOrder | None = None
        self._pause = Pause()
        self._fakes = fake_mode()
        self._count = 0
        self._saved = JustSaved(storage_of)
        self._writer: OrderWriter | None = None
        self._outside: set[int] = set()
        self._next_number: Callable[[], int] | None = None

    @abstractmethod
    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that plans count, and note it."""

    @abstractmethod
    def note_ordered(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the order that has to be noted, and note it."""

    @abstractmethod
    def follow(self, detached: Tensor) -> None:
        """Note a tensor with a version of its own, such as factories of Python return."""

    def take_order(self, order: OperatorOrder | None, inputs: Iterable[Tensor]) -> None:
        """Follow the block by an order, or take its own down without one; call it before the block runs."""
        if self._fakes is not None:
            return
        if order is None:
            self._writer = OrderWriter()
            return
        self.is_in_order = True
        self._outside |= order.outside
        self.admit(inputs)
        self._follow_order(order)

    def admit(self, inputs: Iterable[Tensor]) -> None:
        """Let the inputs of a module be from outside."""
        if self.is_in_order:
            self._outside.update(key for each in inputs if (key := storage_of(each)) is not None)

    def leave_order(self) -> None:
        """Note all operators from now on; call it between two of them."""
        if self.is_in_order:
            self._count = self._counted()
        self.is_in_order = False

    def prove_outside(self, dense: Tensor) -> bool:
        """Say whether a storage that nothing noted has made is from outside, as far as an order tells.

        A forward that is rewired uses what an operator has made that was passed. It is held then.
        """
        if self._writer is not None:
            self._writer.uses(dense)
        return not self.is_in_order or key_of(dense) in self._outside

    def aside(self) -> Pause:
        """Return a context in which operators are none of the forward's."""
        return self._pause

    def close_order(self) -> None:
        """Follow no order any more."""
        self._next_number = self._writer = None
        self.__dict__.pop("__torch_dispatch__", None)  # which refers to the mode

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and note it."""
        if self._pause.is_on:
            return func(*args, **kwargs)
        is_of_block = fake_mode() is self._fakes
        if self.is_in_order and is_of_block:  # an operand is of a kind that the order had not
            self.leave_order()
        self._saved.before(func, args)
        is_counted = is_numbered(func, self._fakes)
        if self._writer is not None and is_of_block:
            self._writer.takes(func, self._count, is_counted=is_counted)
        if is_counted:
            return self.note(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is DETACH:
            self.follow(result)
        return result

    def _counted(self) -> int:
        """Return how many operators have run that plans count."""
        return self._next_number() if self.is_in_order and self._next_number is not None else self._count

    def _follow_order(self, order: OperatorOrder) -> None:
        """Note those operators that have to be, as long as they come in the order of an earlier call."""
        following, end = iter(order.entries), order.end
        pause, saved, just_saved = self._pause, self._saved, self._saved.values
        others = super().__torch_dispatch__

        def dispatch(
            self: OrderedMode,
            func: Any,
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            is_other = pause.is_on or not self.is_in_order or _mode_of(_FAKE) is not None
            if is_other or (types and not PLAIN.issuperset(types)):  # plain ones where autograd detaches
                return others(func, types, args, kwargs)
            entry = next(following, end)
            expected, call, number, how, _ = entry
            if expected is not func:
                self.is_in_order, self._count = False, number
                return others(func, types, args, kwargs)
            if just_saved:
                if func in READS_ONCE:
                    saved.before(func, args)
                else:
                    just_saved.clear()
            if how == PASSED:
                return call(*args, **kwargs) if kwargs else call(*args)
            if func is DETACH:
                result = call(*args)
                self.follow(result)
                return result
            if func is LIFT:
                result = call(*args)
                self.admit([result])
                return result
            self._count = number
            return self.note_ordered(entry, args, kwargs or {})

        _hide_from_dynamo(dispatch.__code__)
        # torch puts a guard against Dynamo around the method of a class, a fifth of the time of an empty mode
        self.__dict__["__torch_dispatch__"] = MethodType(dispatch, self)
        self._next_number = lambda: next(following, end).number


def storage_of(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's storage; `None` without one, as of a wrapper of `torch.func`."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 (no public way)
        return None
    dense = dense_of(tensor)
    return None if dense is None else key_of(dense)


@cache
def _hide_from_dynamo(code: CodeType) -> None:
    """Keep Dynamo from compiling a function and whatever it calls, also where compiled code calls it."""
    skip = eval_frame._FrameAction.SKIP  # noqa: SLF001 (what `torch._dynamo.disable` sets, less its imports)
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))  # noqa: SLF001 (as above)
