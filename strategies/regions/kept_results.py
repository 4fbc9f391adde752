"""Results of operators that forward keeps, and a recomputation finds instead of running the operators again.

A result that is written in place after its operator returned is not what the operator returns, and is kept
no more: the recomputation runs the operator again, and the write. Whether it was written is asked of
storages, as schemas of operators name what is written: `_unsafe_view` (behind every product of three
dimensions), `unsafe_chunk` and `unsafe_split` (in recurrent cells) return tensors on the same storage with
version counters of their own. Writes after the region, which no mode sees, show in the counters of the result
and of all that forward made of it. torch's own selective checkpoint asks the counter of the result alone.

An operator that draws random numbers (attention with dropout) and is not run again would leave the generator
where recomputation found it, and every later dropout would differ from forward's. So its state after the
operator is kept with the result.

Source: torch/utils/checkpoint.py, `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from strategies.base import StrategyError
from strategies.estimate.liveness import key_of
from strategies.estimate.patched import LeavesCompiled
from strategies.estimate.tensors import plain_tensors, tensors_in, tensors_written
from strategies.generators import State, of_device
from strategies.regions.operator_names import Operator
from strategies.regions.saved_tensors import memory_of
from strategies.regions.versions import PLAIN, Version, alias_of_plain


@dataclass(kw_only=True, slots=True)
class _Kept:
    """One result.

    Fields:
        watched: tensors on its storages, as they were after the operator, or when they were made.
        drawn: state of the generator after an operator that has drawn; `None` after another.
    """

    value: Any
    watched: list[Version]
    drawn: State | None

    def is_current(self) -> bool:
        """Say whether nobody has written to the result."""
        return not any(each.is_past() for each in self.watched)


@dataclass(slots=True)
class KeptResults:
    """The results that one call of a region keeps.

    Fields:
        of: results of each operator of the save list by invocation; `None` for one that runs again, as does
            one whose result a recomputation has taken.
    """

    of: dict[Operator, list[_Kept | None]] = field(default_factory=lambda: defaultdict(list))


class Keeping(LeavesCompiled, TorchDispatchMode):
    """Keeps, in the forward of a region, what `keeps` asks for."""

    def __init__(
        self, results: KeptResults, operators: frozenset[Operator], keeps: Callable[[Operator], bool]
    ) -> None:
        super().__init__()
        self._results, self._operators, self._keeps = results, operators, keeps
        self._on: dict[int, list[tuple[Operator, int]]] = defaultdict(list)  # results by storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and keep its result.

        Raises:
            StrategyError: torch loses what the operator does where any mode sees it.
        """
        kwargs = kwargs or {}
        if loses_history(func, args, kwargs):
            raise StrategyError(
                "ac",
                f"{func} writes to views, and torch loses that where operators are watched, as "
                "ac=selective_op does; write to one tensor at a time, or use ac=full",
            )
        out = func(*args, **kwargs)
        if self._on:
            for storage in _storages(tensors_written(func, args, kwargs)):
                for operator, number in self._on.pop(storage, ()):
                    self._results.of[operator][number] = None
        if func in self._operators:
            self._keep(func, out, args, kwargs)
        elif self._on:
            self._watch(out)
        return out

    def _keep(self, func: Operator, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        results = self._results.of[func]
        if not self._keeps(func):
            results.append(None)
            self._watch(out)
            return
        kept = _Kept(value=tree_map_only(Tensor, _alias, out), watched=[], drawn=_drawn(func, args, kwargs))
        self._watch(out)
        kept.watched += [Version(each, each._version) for each in tensors_in(kept.value)]  # noqa: SLF001 (as autograd checks it)
        for storage in _storages(tensors_in(out)):
            self._on[storage].append((func, len(results)))
        results.append(kept)

    def _watch(self, out: Any) -> None:
        for tensor in tensors_in(out) if self._on else ():
            for storage in _storages([tensor]) & self._on.keys():
                alias = _alias(tensor)  # on memory that is kept anyway
                for operator, number in self._on[storage]:
                    kept = self._results.of[operator][number]
                    if kept is not None:  # not written through another of its storages
                        kept.watched.append(Version(alias, alias._version))  # noqa: SLF001 (as autograd checks it)


class Returning(LeavesCompiled, TorchDispatchMode):
    """Returns, in the recomputation of a region, what its forward has kept."""

    def __init__(self, results: KeptResults, operators: frozenset[Operator]) -> None:
        super().__init__()
        self._results, self._operators = results, operators
        self._count: dict[Operator, int] = defaultdict(int)

    def __enter__(self) -> Any:
        """Begin a recomputation, of which each backward has one."""
        self._count.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what was kept of an operator, or run it.

        Raises:
            RuntimeError: in the words of torch: forward did not run it.
        """
        if func not in self._operators:
            return func(*args, **(kwargs or {}))
        results, number = self._results.of[func], self._count[func]
        self._count[func] += 1
        if number >= len(results):
            problem = f"{func} invocation index {number} encountered during backward but not found in storage"
            raise RuntimeError(f"{problem}; its forward depends on state that has changed since")
        kept, results[number] = results[number], None
        if kept is None or not kept.is_current():
            return func(*args, **(kwargs or {}))
        if kept.drawn is not None:
            kept.drawn.put()
        return kept.value


def loses_history(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Say whether autograd loses what an operator writes: under a mode views keep their old history.

    It is one that writes to many tensors. Measured with torch 2.13: `_foreach_mul_` on results of `view` has
    the gradient of nothing written.
    """
    return getattr(func, "_opname", "").startswith("_foreach_") and any(
        each.requires_grad and each._is_view()  # noqa: SLF001 (no public way)
        for each in tensors_written(func, args, kwargs)
    )


def _alias(tensor: Tensor) -> Tensor:
    """Return `tensor` without its graph, with its version counter, although autograd is above."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001 (as torch does)
        return alias_of_plain(tensor) if type(tensor) in PLAIN else tensor.detach()


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of the storages of `tensors`, and of what wrappers hold."""
    parts = (
        [memory] if (memory := memory_of(tensor)) is not None else plain_tensors([tensor])
        for tensor in tensors
    )
    return {
        key_of(part)
        for part in chain.from_iterable(parts)
        if part.layout is torch.strided and not part.is_nested
    }


def _drawn(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State | None:
    if not isinstance(operator, OpOverload) or torch.Tag.nondeterministic_seeded not in operator.tags:
        return None
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001 (torch has no public schema)
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dropout_p" in names and not given.get("dropout_p", 0.0) > 0.0:
        return None
    return of_device(next(each.device for each in tensors_in(args))).now()
