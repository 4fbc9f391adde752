"""`embedding`: the rows of weight that input asks for.

    input (b0, …) of integers < v, weight (v, d) -> output (b0, …, d)

A mesh axis replicates, or shards the vocabulary `v`, the width `d`, or one of the `b` batch dimensions:
`(b + 3)^axes` candidates where everything divides, those of DTensor's rule for `aten.embedding`.

    v     a rank has zeros where another has the row: the output is all-reduced after the forward
    b_i   the gradient of the weight is partial: all-reduced in the backward
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import checked_index, checked_shape
from strategies.shard.candidates.operation import Choice, Dimensions, LocalOperands, Operation, described
from strategies.shard.candidates.products import name_in_rows


def candidates(
    input_shape: Sequence[int],
    num_embeddings: int,
    embedding_dim: int,
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    padding_idx: int | None = None,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of an embedding, full replication first.

    `classic` has neither a sharded vocabulary nor two different batch dimensions: 4 + 5·b on two axes.

    Args:
        input_shape: of the integers, all batch dimensions.
        num_embeddings: `v`.
        embedding_dim: `d`.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        padding_idx: the row that gets no gradient, if any; negative from the end.
        dtype: of weight and output.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none, or there is no such padding row.
    """
    shape = checked_shape("input_shape", input_shape)
    rows, width = checked_shape("num_embeddings, embedding_dim", (num_embeddings, embedding_dim))
    if padding_idx is not None:
        padding_idx = checked_index("padding_idx", padding_idx, rows)
    labels = tuple(f"b{dim}" for dim in range(len(shape)))
    batch = tuple(range(len(shape)))
    operation = Operation(
        name="embedding",
        inputs=(
            Dimensions(
                name="input",
                type="arg",
                shape=shape,
                labels=labels,
                logical=(batch,),
                is_differentiable=False,
                dtype=torch.int64,
                below=rows,
            ),
            described("weight", (rows, width), ("v", "d"), type="param"),
        ),
        outputs=(
            Dimensions(
                name="output",
                type="output",
                shape=(*shape, width),
                labels=(*labels, "d"),
                logical=(batch, (len(shape),)),
            ),
        ),
        terms=(("input", "weight"),),
        dtype=dtype,
        forward_flops=0,
        backward_flops=0,
        compute=partial(_compute, padding_idx=padding_idx),
    )
    return enumerate_candidates(
        operation,
        checked_shape("mesh_shape", mesh_shape),
        mode,
        name=name_in_rows,
        is_classic=_is_classic,
        hardware=hardware,
    )


def from_module(
    module: nn.Embedding,
    input_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the candidates of an `nn.Embedding`, which may be on the meta device.

    Raises:
        StrategyError: as `candidates`; or the module renormalises rows, or has sparse or scaled gradients.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise StrategyError("module", f"must have no {option}, got {getattr(module, option)}")
    return candidates(
        input_shape,
        module.num_embeddings,
        module.embedding_dim,
        mesh_shape,
        mode,
        padding_idx=module.padding_idx,
        dtype=module.weight.dtype,
        hardware=hardware,
    )


def _is_classic(used: tuple[Choice, ...]) -> bool:
    return "v" not in used and len(set(used) - {None, "d"}) <= 1


def _compute(local: LocalOperands, *, padding_idx: int | None) -> Tensor:
    """Return the local output: zeros where another rank has the row."""
    index, weight = local.tensors["input"], local.tensors["weight"]
    part = local.part("v")
    if part.count == 1:
        return local.finished(F.embedding(index, weight, padding_idx))
    start = part.index * len(weight)
    own = index - start
    elsewhere = (own < 0) | (own >= len(weight))
    own_padding = None
    if padding_idx is not None and 0 <= padding_idx - start < len(weight):
        own_padding = padding_idx - start
    rows = F.embedding(own.masked_fill(elsewhere, 0), weight, own_padding)
    return local.finished(rows.masked_fill(elsewhere.unsqueeze(-1), 0))
