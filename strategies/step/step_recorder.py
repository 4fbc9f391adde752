"""The recorder of a training step: each operator once, with its work and the storages that it touched.

The meter of a trial, predictions and the planner read one recording. None of them watches a step on its own
account.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.estimate.collectives import collective_name, payload_bytes
from strategies.estimate.flops import called, flops_of, is_causal, is_uncounted, repeated_scores
from strategies.estimate.liveness import key_of
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import outer_sizes_of, short_name
from strategies.estimate.tensors import dtype_name, plain_tensors, plain_tensors_in, tensors_in
from strategies.step.live_storages import LiveStorages, Touched, WorkspaceProbe
from strategies.step.operator_facts import facts_of
from strategies.step.position import Position

_aten = torch.ops.aten
# no work of the model: checkpointing detaches what it stashes
_BOOKKEEPING = _aten.detach.default
_ALLOCATIONS = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
_COPIES = frozenset({_aten.copy_.default, _aten._to_copy.default})  # noqa: SLF001 (its name)
_OVERWRITES = frozenset(
    {_aten.copy_, _aten.zero_, _aten.fill_, _aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.random_}
)
_ROWS_READ = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
"""Operators that read as many elements of their first operand as they give."""

_WAITED = "_c10d_functional"
"""Namespace of collectives whose result is read as soon as it is there."""


class Collective(NamedTuple):
    """The communication of one operator.

    Fields:
        name: its name in records, such as `all_gather`.
        payload_bytes: the larger of what one call takes and gives on this rank.
        ranks: the ranks that take part.
        is_waited: computation waits for it, as tensor parallelism does; FSDP and DDP communicate meanwhile.
    """

    name: str
    payload_bytes: int
    ranks: tuple[int, ...] = (0,)
    is_waited: bool = False


class OperatorWork(NamedTuple):
    """The work of one operator of a step: what it computes and moves. Equal operators have equal work.

    Fields:
        phase: `forward`, `backward` or `optimizer`.
        name: name and overload, `aten.mm.default`.
        is_recomputed: a forward operator of the backward pass, and no bookkeeping.
        flops: multiplications and additions; 0 of operators without a formula.
        repeated_flops: those of them that a backward kernel of attention computes once more.
        is_causal: attention with a causal mask.
        is_uncounted: it computes more than its bytes tell, and has no formula of FLOPs.
        moved_bytes: bytes of all operands and results; 0 of a view.
        dtype: dtype of the first tensor that it is given, or else makes; empty of views and allocations,
            which launch nothing.
        outer_sizes: those of a matrix product, attention or convolution; none of other operators.
        read_bytes, written_bytes: distinct elements of operands and results, in bytes.
        collective: what it communicates, `None` of what is no collective.
        host_copy: `to_host` or `to_device` of a copy between the two, else empty.
    """

    phase: str
    name: str
    is_recomputed: bool = False
    flops: int = 0
    repeated_flops: int = 0
    is_causal: bool = False
    is_uncounted: bool = False
    moved_bytes: int = 0
    dtype: str = ""
    outer_sizes: tuple[int, ...] = ()
    read_bytes: int = 0
    written_bytes: int = 0
    collective: Collective | None = None
    host_copy: str = ""

    @property
    def short_name(self) -> str:
        """Name without namespace, overload, and the mark of writing in place: `tanh`."""
        return short_name(self.name)

    @property
    def elements(self) -> float:
        """Elements of its operands or of its results, whichever are more."""
        nbytes = max(self.read_bytes, self.written_bytes)
        return nbytes / getattr(torch, self.dtype).itemsize if self.dtype else 0.0

    def seconds(self, machine: Machine) -> float:
        """Return the seconds that `machine` takes."""
        return machine.operator_s(self.flops, self.moved_bytes, name=self.short_name, elements=self.elements)


@dataclass(kw_only=True, slots=True)
class RecordedOperator:
    """One operator of a step as it ran.

    Fields:
        work: what it computed and moved.
        writes: storages that it wrote to in place.
        makes: storages that it made, each with the number of the tensor among its results.
        node: name of the autograd node that ran it; empty outside of backward.
        module, source: FQN of the module and `file:line` of the model's code that it belongs to; empty where
            nobody follows them.
    """

    work: OperatorWork
    start: int
    end: int
    reads: frozenset[int]
    writes: frozenset[int]
    makes: Mapping[int, int]
    node: str
    module: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        """Name and overload."""
        return self.work.name

    @property
    def flops(self) -> int:
        """FLOPs of the call."""
        return self.work.flops


class StepRecorder(LiveStorages):
    """Records the operators between `__enter__` and `__exit__`; of DTensors, those on their local tensors.

    Args:
        position: says where in the step an operator runs.
        device: type of the device that computes.
        probe: sees the private memory of operators, if given.

    Attributes:
        operators: those so far, in order of time.
    """

    def __init__(self, position: Position, *, device: str, probe: WorkspaceProbe | None = None) -> None:
        super().__init__(position, device=device, probe=probe)
        self.operators: list[RecordedOperator] = []
        self._known: dict[OperatorWork, OperatorWork] = {}
        self._makes: set[int] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and record it."""
        result, operator = self.recorded(func, args, kwargs)
        self.operators.append(operator)
        return result

    def recorded(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, RecordedOperator]:
        """Run `func`; return its result and its record."""
        start = self.ledger.moment
        result, touched = self.followed(func, args, kwargs)
        reads = self.storages(touched.operands)
        made: dict[int, int] = {}
        for place, tensor in enumerate(touched.results):
            number = self.number(tensor)
            if number is not None and number not in self._makes and number not in reads:
                made[number] = place
        self._makes.update(made)
        facts = facts_of(func)
        written = plain_tensors_in(list(facts.written(args, kwargs))) if facts.writes else []
        operator, given = called(func, args)
        if given is not args:
            touched = touched._replace(operands=plain_tensors_in((given, kwargs)))
        work = self._work(partial(operator, *given, **kwargs), result, touched, written)
        return result, RecordedOperator(
            work=self._known.setdefault(work, work),
            start=start,
            end=self.ledger.moment,
            reads=reads,
            writes=self.storages(written),
            makes=made,
            node=self._position.node,
            module=self._position.place,
            source=self._source,
        )

    def storages(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the numbers of the known storages of plain tensors."""
        return frozenset(self.numbers(tensors))

    def _work(
        self, call: partial[Any], result: Any, touched: Touched, written: Sequence[Tensor]
    ) -> OperatorWork:
        """Return what an operator has computed and moved.

        Args:
            touched: plain tensors among its operands and results.
            written: plain tensors that it wrote to in place.
        """
        func, args, kwargs = call.func, call.args, call.keywords
        flops = flops_of(func, args, kwargs, result)
        name = collective_name(func)
        moved = () if getattr(func, "is_view", False) else (*touched.operands, *touched.results)
        work = OperatorWork(
            phase=self._position.phase,
            name=facts_of(func).name,
            is_recomputed=func is not _BOOKKEEPING and self._position.is_recomputing,
            flops=flops,
            repeated_flops=repeated_scores(func, args, flops) if flops else 0,
            is_causal=flops > 0 and is_causal(func, args, kwargs),
            is_uncounted=is_uncounted(func, args),
            moved_bytes=sum(each.numel() * each.element_size() for each in moved),
            collective=None if name is None else _collective(func, name, args, result),
            host_copy=self._direction(func, args, result) if func in _COPIES else "",
        )
        operands = _distinct(touched.operands)
        known = {key_of(tensor) for tensor in operands}
        made = [tensor for tensor in _distinct(touched.results) if key_of(tensor) not in known]
        packet = getattr(func, "_overloadpacket", func)
        if packet in _ALLOCATIONS or not (made or written):
            return work
        written_bytes = sum(map(_nbytes, (*made, *_distinct(written))))
        over = {id(tensor) for tensor in written} if packet in _OVERWRITES else set()
        read_bytes = sum(_nbytes(tensor) for tensor in operands if id(tensor) not in over)
        if packet in _ROWS_READ:
            read_bytes += written_bytes - _nbytes(operands[0])
        return work._replace(
            # of a sparse tensor that of its values, and not of their places
            dtype=dtype_name(next(tensors_in((args, kwargs, result))).dtype),
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            outer_sizes=outer_sizes_of(func, args, result),
        )

    def _direction(self, func: Any, args: tuple[Any, ...], result: Any) -> str:
        """Return where a copy goes between device and host; nothing where it stays."""
        target, source = (args[0], args[1]) if func is _aten.copy_.default else (result, args[0])
        if not isinstance(source, Tensor) or self._lies_there(target) == self._lies_there(source):
            return ""
        return "to_host" if self._lies_there(target) else "to_device"

    def _lies_there(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in host memory while the model computes elsewhere."""
        return any(self.ledger.lives[number].on_host for number in self.storages(plain_tensors([tensor])))


def _collective(func: Any, name: str, args: tuple[Any, ...], result: Any) -> Collective:
    """Return what a collective communicates, with the ranks that take part."""
    return Collective(
        name=name,
        payload_bytes=payload_bytes(args, result),
        ranks=tuple(_ranks_of(args)),
        is_waited=func.namespace == _WAITED,
    )


def _ranks_of(args: Sequence[Any]) -> list[int]:
    """Return the ranks that take part in a collective: a group is among its arguments, or the name of one."""
    groups: dict[Any, Any] = {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}  # noqa: SLF001 (no public way)
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
        if isinstance(argument, str) and argument in groups:
            return dist.get_process_group_ranks(groups[argument])
    return [0]


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor: an expanded dimension is one."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size() if tensor.numel() else 0
