"""Batch loops: a model runs on a part of its batch at a time, and its results are put together.

This is the outermost loop: the loops of a plan run inside of it, each for fewer samples. It stands around the
model where a proof says that this changes nothing (`strategies/chunk/flow/batch_flow.py`), only without
gradients, and only where no hook would see a block's inputs in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_unflatten

from strategies.chunk.flow.axes import whole
from strategies.chunk.flow.batch_flow import BatchFlow
from strategies.chunk.running.runtime import Buffer, dense_strides, write_chunk
from strategies.tracing.guard import Call, Guard, Programs, is_of_fsdp
from strategies.tracing.module_state import hooks_of
from strategies.tracing.recorder import leaves_of
from strategies.tracing.scope_graph import ScopeGraph

_is_checked: ContextVar[bool] = ContextVar("is_checked", default=False)
_FEW = 3  # chunks, of which the last may be the one that is shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchProof:
    """The proof of calls of one kind.

    Fields:
        flow: how the batch goes through the model; `None` where it may not run in parts.
        graph: graph of the model for the whole batch.
    """

    guard: Guard
    flow: BatchFlow | None
    graph: ScopeGraph

    def taken_over(self, module: nn.Module, tensors: Sequence[Tensor]) -> BatchProof | None:
        """Return what is known of another module, if that reads the same."""
        guard = self.guard.taken_over(module, tensors)
        return None if guard is None else replace(self, guard=guard)

    def buffers(self) -> list[Buffer]:
        """Return the memory that the results are put together in."""
        return list(map(_buffer, BatchFlow.results([self.graph])))


@dataclass(kw_only=True, slots=True)
class BatchLoop:
    """The loop over the batch of a model.

    Fields:
        proofs: what is known, by kind of the call.
        alike: what is known of modules of the same classes.
        chunks: how often the model ran in the latest call.
    """

    length: int
    proofs: Programs[BatchProof] = field(default_factory=Programs)
    alike: Programs[BatchProof] = field(default_factory=Programs)
    chunks: int = 0

    def proof(self, module: nn.Module, call: Call, prove: Callable[[], BatchProof]) -> BatchProof | None:
        """Return the proof that a call may run in parts, `None` where it may not.

        Args:
            prove: looks for a proof where none is known.
        """
        kind = call.kind, self.length
        proof = self.proofs.find(
            kind, lambda known: known if known.guard.fits(module, call.tensors) else None
        ) or self.alike.find(kind, lambda known: known.taken_over(module, call.tensors))
        if proof is None:
            proof = prove()
        self.proofs.keep(kind, proof)
        self.alike.keep(kind, proof)
        return proof if proof.flow is not None and proof.flow.size > self.length else None

    def run(self, proof: BatchProof, run: Callable[..., Any], inputs: Any) -> Any:
        """Return what the model returns.

        Args:
            run: the forward, of `(args, kwargs)`.
            inputs: args and kwargs of the call.
        """
        assert proof.flow is not None
        buffers = [buffer.allocate((), may_overwrite=False) for buffer in proof.buffers()]
        self.chunks, lengths = 0, set[int]()
        for start, length in self._spans(proof.flow.size, inputs):
            with _checked(is_checked=length in lengths):
                results = run(*part_of(proof.flow, inputs, start, length))
            lengths.add(length)
            _write(results, buffers, start)
            del results
            self.chunks += 1
        return tree_unflatten(leaves_of(proof.graph.outputs, buffers), proof.graph.structure)

    def lengths(self, size: int) -> set[int]:
        """Return the samples of the chunks of a batch: of most of them, and of the last."""
        return {self.length, size % self.length or self.length}

    def _spans(self, size: int, inputs: Any) -> Iterator[tuple[int, int]]:
        """Yield start and length of each chunk; without data, of more than three of those that differ."""
        starts: Sequence[int] = range(0, size, self.length)
        is_without_data = any(isinstance(each, FakeTensor) for each in tree_leaves(inputs))
        if is_without_data and len(starts) > _FEW:
            starts = (*starts[:2], starts[-1])
        return ((start, min(self.length, size - start)) for start in starts)


def is_checked() -> bool:
    """Say if programs that ran for a chunk of this size still fit: no code of the user's ran since."""
    return _is_checked.get()


@contextmanager
def _checked(*, is_checked: bool) -> Iterator[None]:
    token = _is_checked.set(is_checked)
    try:
        yield
    finally:
        _is_checked.reset(token)


def part_of(flow: BatchFlow, inputs: Any, start: int, length: int) -> Any:
    """Return some samples of the inputs of a model; what was one tensor stays one."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    cut = {id(each): each for each, is_cut in zip(tensors, flow.cuts, strict=True) if is_cut}
    made = {key: each.narrow(0, start, length) for key, each in cut.items()}
    return tree_map_only(Tensor, lambda each: made.get(id(each), each), inputs)


def is_watched(scope: nn.Module) -> bool:
    """Say if somebody around a scope would see its inputs in parts: a hook but FSDP's, a patched forward."""
    return "forward" in vars(scope) or not all(map(is_of_fsdp, hooks_of(scope)))


def _write(results: Any, buffers: Sequence[Tensor], start: int) -> None:
    tensors = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    with torch.no_grad():
        for buffer, chunk in zip(buffers, tensors, strict=True):
            write_chunk(buffer, whole(0, buffer.shape), start, chunk)


def _buffer(value: Tensor) -> Buffer:
    return Buffer(
        shape=tuple(value.shape),
        strides=tuple(dense_strides(value)),
        dtype=value.dtype,
        device=value.device,
        axis=whole(0, value.shape),
    )
