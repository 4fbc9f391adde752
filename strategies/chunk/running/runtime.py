"""The runtime of loops: chunks of tensors, and the module that calls a loop's body for each chunk."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from strategies.base import StrategyError
from strategies.chunk.flow.axes import Axis
from strategies.estimate.recomputing import recomputing
from strategies.regions.blocks import Chunked, Enclosed
from strategies.regions.saved_tensors import without_hooks
from strategies.step.live_storages import LiveStorages
from strategies.tracing.guard import kind_of_result

_FEW = 3  # chunks, of which the last may be the one that is shorter


def take_chunk(tensor: Tensor, axis: Axis, start: int, length: int, *, copy: bool) -> Tensor:
    """Return positions `start` to `start + length` of an axis of `tensor`.

    Args:
        tensor: tensor of any layout.
        axis: the axis.
        start, length: positions of the axis.
        copy: whether the chunk shall lie densely in memory of its own.
    """
    dim, is_one_piece = axis.dim, axis.outer(tensor.shape) == 1
    if axis.span == 1 and is_one_piece:
        first, end = axis.places(start, length)
        chunk = tensor.narrow(dim, first, end - first)
    else:
        chunk = _part(tensor, axis, start, length).flatten(dim, dim + 2)
        chunk = chunk.unflatten(dim, (*[1] * (axis.span - 1), -1))
    return chunk.clone() if copy and is_one_piece else chunk


def _part(tensor: Tensor, axis: Axis, start: int, length: int) -> Tensor:
    """Return positions of an axis, seen as (outer, length, inner)."""
    dim, sizes = axis.dim, (axis.outer(tensor.shape), axis.extent, axis.inner)
    parts: Tensor = tensor.flatten(dim, axis.dims[-1]).unflatten(dim, sizes)
    return parts.narrow(dim + 1, axis.before + start, length)


def write_chunk(buffer: Tensor, axis: Axis, start: int, chunk: Tensor) -> None:
    """Write `chunk` to the positions of an axis of `buffer` that begin at `start`."""
    dim, last, outer = axis.dim, axis.dims[-1], axis.outer(buffer.shape)
    length = chunk.shape[last] // (axis.inner * outer)
    if axis.span == outer == 1:
        first = (axis.before + start) * axis.inner
        buffer.narrow(dim, first, length * axis.inner).copy_(chunk)
    else:
        part = chunk.flatten(dim, last).unflatten(dim, (outer, length, axis.inner))
        _part(buffer, axis, start, length).copy_(part)


def add_chunk(total: Tensor, axis: Axis, start: int, length: int, chunk: Tensor) -> None:
    """Add a chunk of an axis with a halo to the positions of `total` that it has."""
    first, end = axis.places(start, length)
    total.narrow(axis.dim, first, end - first).add_(chunk)


def narrowed(chunk: Tensor, given: Axis, wanted: Axis, start: int, length: int) -> Tensor:
    """Return the part of a chunk of the axis `given` that a chunk of the axis `wanted` is."""
    first, end = wanted.places(start, length)
    return chunk.narrow(wanted.dim, first - given.places(start, length)[0], end - first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """The memory in which an output of a loop is put together.

    Fields:
        shape, strides, dtype, device: layout of the output.
        axis: axis along which chunks are written; `None` for a sum.
        into: position of the input whose buffer is reused, or `None`.
        has_gradient: whether backward computes a gradient for the output.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: Axis | None
    into: int | None = None
    has_gradient: bool = True

    def allocate(self, inputs: Sequence[Tensor], *, may_overwrite: bool) -> Tensor:
        """Return the memory of the output."""
        if self.into is not None and may_overwrite:
            return inputs[self.into]
        empty = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return empty if self.axis is not None else empty.zero_()


_is_again: ContextVar[bool] = ContextVar("is_again", default=False)


@contextmanager
def running_again() -> Iterator[None]:
    """Skip loops whose outputs are unread: a recomputation needs only what autograd saves."""
    token = _is_again.set(True)
    try:
        yield
    finally:
        _is_again.reset(token)


GIVEN = "_acbench_given"
"""The attribute of a chunked module that says which inputs of its next call may be overwritten."""


@dataclass(frozen=True, slots=True)
class Callee:
    """A module that a program calls, and what kinds of results the calls of the program return.

    Fields:
        module: chunked module.
        fqn: its FQN, for messages.
        returns: kinds of results of all calls of the program, in order.
    """

    module: nn.Module
    fqn: str
    returns: Iterator[Hashable]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns.

        Raises:
            StrategyError: that is of another kind than when the program was recorded.
        """
        result = self.module(*args, **kwargs)
        if kind_of_result(result) != next(self.returns):
            problem = f"{self.fqn!r} returns a {type(result).__name__} of another structure, shape or dtype"
            raise StrategyError("chunk", f"{problem} than its forward; remove the hook that makes it")
        return result


def call_giving(callee: Callee, given: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """Return `callee(*args, **kwargs)`, which may overwrite tensors at `given` if nobody else sees them."""
    module = callee.module
    is_enclosed = isinstance(module, Enclosed | FSDPModule)
    is_seen = is_enclosed or module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001
    if given and isinstance(module, Chunked) and not is_seen and not torch.is_grad_enabled():
        module.__dict__[GIVEN] = frozenset(given)
    return callee(*args, **kwargs)


def call_under(
    callee: Callee,
    given: tuple[int, ...],
    dtypes: dict[str, torch.dtype],
    has_gradients: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `call_giving(callee, given, ...)` under autocast, or without gradients."""
    with ExitStack() as stack:
        for kind, dtype in dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype))
        stack.enter_context(torch.set_grad_enabled(has_gradients and torch.is_grad_enabled()))
        return call_giving(callee, given, *args, **kwargs)


class ChunkLoop(nn.Module):
    """A region as a loop over chunks: its body runs once a chunk and writes to preallocated outputs.

    With gradients on, nothing that a body computes is saved but the outputs that `keeps` names. Backward
    runs the bodies again, chunk by chunk, and adds up the gradients of inputs that every chunk uses. With
    `ahead` that is done in forward, and backward multiplies these gradients by that of the output.

    Args:
        body: `(start, length, *takes, *buffers)`, writes its results to the buffers.
        results: `(start, length, *chunks)` of the same operators, returns them; chunks are what `takes`, and
            the kept outputs behind them, are cut into.
        axes: axes of the takes, then of what is kept; `None` for those that are needed whole.
        copies: which of these have chunks that are copied.
        updates: which of these the body writes to. Backward writes to copies of them.
        keeps: positions of the outputs that backward takes, rather than compute them again.
        ahead: position of the only output with a gradient, which is the same for all of its elements; `None`
            where backward alone knows the gradients.
        outputs: where the results are put together.
        size, length: positions of the axis and of a chunk.
        is_unread: true where autograd saves nothing that depends on the outputs.
    """

    def __init__(
        self,
        *,
        body: fx.GraphModule,
        results: fx.GraphModule,
        axes: Sequence[Axis | None],
        copies: Sequence[bool],
        updates: Sequence[bool],
        keeps: Sequence[int],
        ahead: int | None,
        outputs: Sequence[Buffer],
        size: int,
        length: int,
        is_unread: bool,
    ) -> None:
        super().__init__()
        self.body = body
        self.results = results
        self.axes = tuple(axes)
        self.copies = tuple(copies)
        self.updates = tuple(updates)
        self.keeps = tuple(keeps)
        self.ahead = ahead
        self.outputs = tuple(outputs)
        self.size = size
        self.length = length
        self.is_unread = is_unread

    @property
    def chunks(self) -> int:
        """The number of runs of the body in a forward."""
        return ceil(self.size / self.length)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the results of the region, a tuple where there are several."""
        if torch.is_grad_enabled() and any(operand.requires_grad for operand in inputs):
            results = (_Recomputed if self.ahead is None else _Ahead).apply(self, *inputs)
        else:
            results = self.run(inputs, may_overwrite=True)
        return results[0] if len(self.outputs) == 1 else results

    def run(self, inputs: Sequence[Tensor], *, may_overwrite: bool) -> tuple[Tensor, ...]:
        """Return the results, without a graph of autograd."""
        buffers = tuple(buffer.allocate(inputs, may_overwrite=may_overwrite) for buffer in self.outputs)
        if self.is_unread and _is_again.get():
            return buffers
        for start, length in self.spans(inputs):
            self.body(start, length, *inputs, *buffers)
        return buffers

    def spans(self, inputs: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return start and length of each chunk; without data, of more than three of those that differ."""
        starts: Sequence[int] = range(0, self.size, self.length)
        if any(isinstance(operand, FakeTensor) for operand in inputs) and not _is_watched():
            meets_border = any(axis is not None and axis.has_halo for axis in self.axes)
            few = (*starts[:2], starts[-1]) if meets_border else starts[:2]
            starts = starts if self.chunks <= _FEW else few
        return [(start, min(self.length, self.size - start)) for start in starts]


def _is_watched() -> bool:
    """Return whether something sees every operator: a selective region keeps results of each chunk."""
    blind = FakeTensorMode | LiveStorages
    return not all(isinstance(mode, blind) for mode in _get_current_dispatch_mode_stack())


class _Recomputed(torch.autograd.Function):
    """The loop for autograd: saves its inputs and what it keeps, and runs its bodies again in backward."""

    @staticmethod
    def forward(ctx: Any, loop: ChunkLoop, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run the loop without recording it, and save its inputs and what it keeps."""
        ctx.loop = loop
        results = loop.run(inputs, may_overwrite=False)
        ctx.save_for_backward(*inputs, *(results[at] for at in loop.keeps))
        parts = zip(results, loop.outputs, strict=True)
        ctx.mark_non_differentiable(*(each for each, buffer in parts if not buffer.has_gradient))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        taken = ctx.saved_tensors  # asked for once: hooks recompute them
        needed = (*ctx.needs_input_grad[1:], *(False for _ in ctx.loop.keeps))
        parts = zip(needed, taken, strict=True)
        wanted = [is_needed and operand.is_floating_point() for is_needed, operand in parts]
        totals = _backward(ctx.loop, taken, wanted, gradients)
        return None, *totals[: len(totals) - len(ctx.loop.keeps)]


class _Ahead(torch.autograd.Function):
    """The loop for autograd: differentiates each chunk in forward, as for a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, loop: ChunkLoop, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run the loop, and save the gradients of its inputs."""
        results = tuple(buffer.allocate(inputs, may_overwrite=False) for buffer in loop.outputs)
        ones = [
            result.new_ones(()).expand(result.shape) if at == loop.ahead else None
            for at, result in enumerate(results)
        ]
        needed = zip(ctx.needs_input_grad[1:], inputs, strict=True)
        wanted = [is_needed and operand.is_floating_point() for is_needed, operand in needed]
        with without_hooks():  # nobody waits for what this saves
            totals = _backward(loop, inputs, wanted, ones, results)
        ctx.ahead = loop.ahead
        ctx.save_for_backward(*totals)
        ctx.mark_non_differentiable(*(each for at, each in enumerate(results) if at != loop.ahead))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        totals, given = ctx.saved_tensors, gradients[ctx.ahead]
        if given is None:
            return (None,) * (1 + len(totals))
        factor = given[(0,) * given.dim()]  # that of all elements
        # whoever keeps the graph may come again
        is_kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 (no public way)
        scaled = (
            total if total is None else total * factor if is_kept else total.mul_(factor) for total in totals
        )
        return None, *scaled


def _backward(
    loop: ChunkLoop,
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
    buffers: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Return the gradients of `takes`, those of sliced ones put together and those of whole ones added up.

    Args:
        loop: the loop.
        inputs: the takes, then what is kept, of which no gradient is wanted.
        wanted: which of these need a gradient.
        gradients: those of the outputs.
        buffers: memory of the outputs, where this is the first run; none in backward.
    """
    leaves = [
        operand.detach().requires_grad_(is_wanted) if axis is None else operand.detach()
        for operand, axis, is_wanted in zip(inputs, loop.axes, wanted, strict=True)
    ]
    totals: list[Tensor | None] = []
    for leaf, axis, is_wanted in zip(leaves, loop.axes, wanted, strict=True):
        is_added_to = axis is None or axis.has_halo or not axis.is_complete
        totals.append(_total(leaf, is_sum=is_added_to) if is_wanted else None)
        if axis is None:
            leaf.grad = totals[-1]  # autograd adds to it in place
    for span in loop.spans(inputs):
        _backward_chunk(loop, leaves, gradients, totals, span=span, buffers=buffers)
    return totals


def _total(operand: Tensor, *, is_sum: bool) -> Tensor:
    """Return the memory of a gradient, in the layout in which autograd would make it."""
    strides = dense_strides(operand)
    total = torch.empty_strided(operand.shape, strides, dtype=operand.dtype, device=operand.device)
    return total.zero_() if is_sum else total


def dense_strides(tensor: Tensor) -> Sequence[int]:
    """Return the strides of a tensor where it is dense in memory, else those of a contiguous one."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return tensor.stride() if is_dense else make_contiguous_strides_for(tensor.shape)


def _backward_chunk(
    loop: ChunkLoop,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    totals: Sequence[Tensor | None],
    *,
    span: tuple[int, int],
    buffers: Sequence[Tensor],
) -> None:
    """Compute one chunk, differentiate it, and put the gradients of its inputs where they belong."""
    start, length = span
    chunks = _chunks(loop, inputs, totals, span)
    again = nullcontext() if buffers else recomputing()  # products that accumulate run without recording
    with torch.enable_grad(), again:
        results = loop.results(start, length, *chunks)
    for result, memory, buffer in zip(results, buffers, loop.outputs, strict=False):
        if buffer.axis is None:
            memory.add_(result)
        else:
            write_chunk(memory, buffer.axis, start, result)
    outputs, given = [], []
    for result, gradient, buffer in zip(results, gradients, loop.outputs, strict=True):
        if gradient is not None and result.requires_grad:
            axis = buffer.axis
            outputs.append(result)
            given.append(gradient if axis is None else take_chunk(gradient, axis, start, length, copy=False))
    del results, result, gradient
    if outputs:
        torch.autograd.backward(outputs, given)
    for chunk, total, axis in zip(chunks, totals, loop.axes, strict=True):
        if total is not None and axis is not None and axis.has_halo:
            if chunk.grad is not None:
                add_chunk(total, axis, start, length, chunk.grad)
            chunk.grad = None
        elif total is not None and axis is not None:
            gradient = total.new_zeros(()).expand(chunk.shape) if chunk.grad is None else chunk.grad
            write_chunk(total, axis, start, gradient)
            chunk.grad = None


def _chunks(
    loop: ChunkLoop, inputs: Sequence[Tensor], totals: Sequence[Tensor | None], span: tuple[int, int]
) -> list[Tensor]:
    """Return what the body takes for one chunk; what has a total requires a gradient."""
    copies = map(operator.or_, loop.copies, loop.updates)
    parts = zip(inputs, loop.axes, copies, totals, strict=True)
    return [
        operand
        if axis is None
        else take_chunk(operand, axis, *span, copy=copy).requires_grad_(total is not None)
        for operand, axis, copy, total in parts
    ]
