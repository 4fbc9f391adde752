"""Waiting until gloo has released the tensors of a collective: it keeps them for a moment longer.

A thread of gloo runs a collective, wakes whoever waits for it, and only then lets go of the tensors: at
once on an idle machine, a long time later on a busy one. The program drops them in between, so when storages
die, and how high they pile up, would be a matter of luck. Here a collective that was waited for ends when
gloo has let go of it too; until then the program stands still.

Tensors off the CPU are left alone: NCCL lets go of them in the thread that waits. So is what DDP reduces in
C++, whose buckets live on anyway, and what a functional reduce-scatter copies for itself.

Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, `runLoop`, `GlooReduceScatterWork`.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import _disable_current_modes

from harness.measure.gloo.lent_tensors import (
    TensorFinder,
    TensorLender,
    holders,
    sole_holder,
    storage_holders,
)
from strategies.estimate.collectives import group_methods
from strategies.estimate.liveness import key_of
from strategies.estimate.patched import wrapped
from strategies.estimate.tensors import plain_tensors, tensors_in

_POLL_S = 1e-4
_POLLS = 600_000
"""Polls for at least a minute; counted, because a clock runs on while the process is stopped."""

_POLLS_OF_VIEWS = 5_000
"""Polls for at least half a second."""

_FUNCTIONAL = "_c10d_functional"
_WAIT = "_c10d_functional::wait_tensor"

_Function = Callable[..., Any]


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Make every wait for a collective on the CPU last until gloo has released its tensors.

    Where there is no process group, there are no collectives, and each call of an operator would be followed
    for nothing.

    Raises:
        RuntimeError: gloo still held a tensor a minute after the wait.
    """
    if not dist.is_initialized():
        yield
        return
    loans = _Loans()
    with ExitStack() as patches:
        patches.callback(loans.clear)
        for patch in loans.patches():
            patches.enter_context(patch)
        yield
    loans.require_settled()


@dataclass(kw_only=True, slots=True)
class _Loan:
    """The tensors that one collective holds.

    Fields:
        lent: its tensors; in the program only this list holds them.
        storage_holders: how many held the storage of each before, by its place in `lent`, where known.
        work: what ends the loan when the program drops it; `None` for a functional collective.
        is_over: whether the program has waited for `work`.
        unwaited: storages of those results of a functional collective that the program has not waited for.
    """

    lent: list[Tensor]
    storage_holders: Mapping[int, int] = field(default_factory=dict)
    work: weakref.ref[dist.Work] | None = None
    is_over: bool = False
    unwaited: set[int] = field(default_factory=set)


class _Loans:
    """All loans: by the identity of a `Work`, or by the storages of functional results."""

    def __init__(self) -> None:
        self._sole_holder = sole_holder()
        self._by_work: dict[int, _Loan] = {}
        self._by_result: dict[int, _Loan] = {}
        self._is_overdue = False
        self._is_calling = False

    def patches(self) -> Iterator[AbstractContextManager[None]]:
        """Yield the scopes in which collectives and their waits are followed."""
        for name in group_methods():
            yield wrapped(dist.ProcessGroup, name, self._start)
        yield wrapped(dist.Work, "wait", self._end)
        for name in ("get_future", "result"):
            yield wrapped(dist.Work, name, self._give_away)
        yield wrapped(dist, "_broadcast_coalesced", self._run)
        # on the class: there is code that compares packets, or asks them for their overloads
        yield wrapped(OpOverloadPacket, "__call__", self._call_packet)
        yield wrapped(OpOverload, "__call__", self._call_overload)  # as graphs do

    def clear(self) -> None:
        """Forget the loans that never ended."""
        self._by_work.clear()
        self._by_result.clear()

    def require_settled(self) -> None:
        """Refuse a step whose bytes include tensors that only gloo held."""
        if self._is_overdue:
            problem = "gloo: tensors of a collective are still held a minute after the program waited for it"
            raise RuntimeError(f"{problem}; bytes would count that are not the program's")

    def _start(self, original: _Function, /, *args: Any, **kwargs: Any) -> Any:
        """Start a collective with lent tensors, and remember them until it is over."""
        with TensorLender() as lending:
            work = original(*args, **kwargs)
        if work is not None and lending.lent:
            key = id(work)
            dropped = functools.partial(self._on_dropped, key)
            self._by_work[key] = _Loan(
                lent=lending.lent,
                storage_holders=lending.storage_holders,
                work=weakref.ref(work, dropped),
            )
        return work

    def _end(self, original: _Function, work: dist.Work, /, *args: Any, **kwargs: Any) -> Any:
        """Wait for a collective; its results then lie in the program's own tensors."""
        loan = self._by_work.get(id(work))
        if loan is None:
            return original(work, *args, **kwargs)
        # gloo sums and scatters in here, on copies that are none of the program's storages
        with _disable_current_modes(), TensorFinder(loan.lent):
            result = original(work, *args, **kwargs)
        loan.is_over = True
        return result

    def _give_away(self, original: _Function, work: dist.Work, /, *args: Any, **kwargs: Any) -> Any:
        self._by_work.pop(id(work), None)  # the program gets gloo's tensors, and may hold them
        return original(work, *args, **kwargs)

    def _run(self, original: _Function, /, *args: Any, **kwargs: Any) -> Any:
        with TensorLender() as lending:
            result = original(*args, **kwargs)
        self._settle(lending.lent)
        return result

    def _call_packet(self, original: _Function, packet: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = packet._qualified_op_name  # noqa: SLF001 (no public name)
        return self._call(functools.partial(original, packet), name, args, kwargs)

    def _call_overload(self, original: _Function, overload: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = overload._name  # noqa: SLF001 (no public name)
        return self._call(functools.partial(original, overload), name, args, kwargs)

    def _call(self, operator: _Function, name: str, args: Any, kwargs: Any) -> Any:
        if self._is_calling or not name.startswith(_FUNCTIONAL):  # modes call what a packet has called
            return operator(*args, **kwargs)
        self._is_calling = True
        try:
            if name == _WAIT:
                result = operator(*args, **kwargs)
                for key in map(key_of, plain_tensors(tensors_in(args))):
                    loan = self._by_result.pop(key, None)
                    if loan is None:
                        continue
                    loan.unwaited.discard(key)
                    if not loan.unwaited:
                        self._settle(loan.lent)
                return result
            with TensorLender() as lending:
                result = operator(*args, **kwargs)
            self._enter_results(result, lending.lent)
            return result
        finally:
            self._is_calling = False

    def _enter_results(self, result: Any, lent: list[Tensor]) -> None:
        if lent:
            keys = set(map(key_of, plain_tensors(tensors_in(result))))
            self._by_result.update(dict.fromkeys(keys, _Loan(lent=lent, unwaited=keys)))

    def _on_dropped(self, key: int, _: weakref.ref[dist.Work]) -> None:
        loan = self._by_work.pop(key)
        if loan.is_over:
            self._settle(loan.lent)
            _settle_views(loan)

    def _settle(self, lent: list[Tensor]) -> None:
        """Wait until nobody but the list holds what is in `lent`."""
        for _ in range(0 if self._is_overdue else _POLLS):
            if all(held == self._sole_holder for held in holders(lent)):
                return
            time.sleep(_POLL_S)
        self._is_overdue = True


def _settle_views(loan: _Loan) -> None:
    """Wait until no more hold the storages of tensors than before the collective.

    Gloo gathers into views of its own, one a rank, and its thread lets go of them after all else. Nobody else
    sees these. A program that was given its `Work` may itself hold more by now, so this wait has an end.
    """
    for _ in range(_POLLS_OF_VIEWS):
        if all(storage_holders(loan.lent[place]) <= before for place, before in loan.storage_holders.items()):
            return
        time.sleep(_POLL_S)
