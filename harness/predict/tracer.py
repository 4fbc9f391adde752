"""Writes the trace of a step as its operators run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure.collectives import collective_name, payload_bytes
from harness.measure.memory.locator import Locator
from harness.predict.trace import CollectiveCall, HostCopy, OperatorCall, PolicyCall, Trace
from strategies.estimate.host import allocating_on_host
from strategies.estimate.liveness import key_of
from strategies.estimate.operator_cost import outer_sizes_of
from strategies.estimate.tensors import tensors_in, tensors_written

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
_COPIES = frozenset({_aten.copy_.default, _aten._to_copy.default})  # noqa: SLF001 (its name)
_OVERWRITES = frozenset(
    {_aten.copy_, _aten.zero_, _aten.fill_, _aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.random_}
)
_WAITED = "_c10d_functional"
"""Namespace of collectives whose result is read as soon as it is there."""

_ROWS_READ = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
"""Operators that read as many elements of their first operand as they give."""

TracedCall: TypeAlias = OperatorCall | CollectiveCall | HostCopy | PolicyCall


class Tracer:
    """Is told of every operator of a step.

    Args:
        locator: says where in the step an operator runs.
        ranks_per_node: ranks of the trial that share a node.

    Attributes:
        calls: what the step has done so far, in order of time; each has the count 1.
    """

    def __init__(self, locator: Locator, *, ranks_per_node: int) -> None:
        self._locator = locator
        self._ranks_per_node = ranks_per_node
        self.calls: list[TracedCall] = []
        self._known: dict[TracedCall, TracedCall] = {}
        self._on_host: WeakSet[torch.UntypedStorage] = WeakSet()

    def heard(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, flops: int
    ) -> None:
        """Note one operator."""
        call = self._call(func, args, kwargs, result, flops)
        if call is not None:
            self._note(call)

    def asked(self) -> None:
        """Note that Python is asked about an operator."""
        self._note(PolicyCall(phase=self._locator.phase))

    def _note(self, call: TracedCall) -> None:
        self.calls.append(self._known.setdefault(call, call))

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, flops: int
    ) -> TracedCall | None:
        """Return what an operator is to time: a collective, a copy to or from the host, or a computation."""
        name = collective_name(func)
        if name is not None:
            return self._collective(func, name, args, result)
        direction = self._direction(func, args, result)
        if direction is not None:
            return HostCopy(phase=self._locator.phase, direction=direction, nbytes=_nbytes(args[0]))
        return self._operator(func, args, kwargs, result, flops)

    def _operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, flops: int
    ) -> OperatorCall | None:
        """Return what an operator reads and writes; `None` of one that does neither."""
        packet = getattr(func, "_overloadpacket", func)
        operands = _distinct(tensors_in((args, kwargs)))
        known = {key_of(tensor) for tensor in operands}
        made = [tensor for tensor in _distinct(tensors_in(result)) if key_of(tensor) not in known]
        changed = _distinct(tensors_written(func, args, kwargs))
        if packet in _ALLOCATIONS or not (made or changed):
            return None
        written = sum(map(_nbytes, (*made, *changed)))
        over = {id(tensor) for tensor in changed} if packet in _OVERWRITES else set()
        read = sum(_nbytes(tensor) for tensor in operands if id(tensor) not in over)
        if packet in _ROWS_READ:
            read += written - _nbytes(operands[0])
        return OperatorCall(
            phase=self._locator.phase,
            name=str(func),
            is_recomputed=self._locator.is_recomputing,
            dtype=str((*operands, *made)[0].dtype).removeprefix("torch."),
            flops=flops,
            read_bytes=read,
            written_bytes=written,
            outer_sizes=outer_sizes_of(func, args, result),
        )

    def _collective(self, func: Any, name: str, args: tuple[Any, ...], result: Any) -> CollectiveCall:
        """Return the entry of a collective, with the ranks that take part."""
        ranks = _ranks_of(args)
        return CollectiveCall(
            phase=self._locator.phase,
            name=name,
            payload_bytes=payload_bytes(args, result),
            group_size=len(ranks),
            furthest_rank=max(ranks),
            crosses_nodes=len({rank // self._ranks_per_node for rank in ranks}) > 1,
            is_waited=func.namespace == _WAITED,
            is_recomputed=self._locator.is_recomputing,
        )

    def _direction(self, func: Any, args: tuple[Any, ...], result: Any) -> str | None:
        """Return where a copy goes between device and host; `None` of other operators."""
        if allocating_on_host():  # on CPU both are one kind of memory
            self._on_host.update(tensor.untyped_storage() for tensor in tensors_in(result))
        if func not in _COPIES:
            return None
        target, source = (args[0], args[1]) if func is _aten.copy_.default else (result, args[0])
        if not isinstance(source, Tensor) or self._lies_on_host(target) == self._lies_on_host(source):
            return None
        return "to_host" if self._lies_on_host(target) else "to_device"

    def _lies_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._on_host


def trace_of(calls: Iterable[TracedCall], *, device: str, computes_in: str) -> Trace:
    """Return the trace of a step: equal calls are one.

    Args:
        calls: all of the step, in order of time.
        device: type of the device that computes.
        computes_in: dtype of most matrix multiplications.
    """
    counted = [replace(call, count=count) for call, count in Counter(calls).items()]
    return Trace(
        device=device,
        computes_in=computes_in,
        operators=tuple(call for call in counted if isinstance(call, OperatorCall)),
        collectives=tuple(call for call in counted if isinstance(call, CollectiveCall)),
        host_copies=tuple(call for call in counted if isinstance(call, HostCopy)),
        policy_calls=tuple(call for call in counted if isinstance(call, PolicyCall)),
    )


def _distinct(tensors: Iterator[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor: an expanded dimension is one."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _ranks_of(args: Sequence[Any]) -> list[int]:
    """Return the ranks that take part in a collective: a group is among its arguments, or the name of one."""
    groups: dict[Any, Any] = {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}  # noqa: SLF001 (no public way)
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
        if isinstance(argument, str) and argument in groups:
            return dist.get_process_group_ranks(groups[argument])
    return [0]
