"""One table of operators with what torch calls the same, for the tests that all of them must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.operation import Choice
from strategies.shard.operators import (
    addmm,
    batch_norm,
    bmm,
    conv2d,
    elementwise,
    embedding,
    getitem,
    layer_norm,
    matmul,
    permute,
    softmax,
    split,
    transpose,
    view,
)
from strategies.shard.operators import sum as sum_

Tensors: TypeAlias = Mapping[str, Tensor]
MESH = (2, 2)
F64 = torch.float64


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An operator on the 2 x 2 mesh.

    Fields:
        count: of its complete candidates.
        candidates: all of them, in double precision.
        torch: the operator as torch has it, on operands by name.
        in_dtensor: whether DTensor, too, has a candidate with these choices, at no communication.
    """

    count: int
    candidates: tuple[Candidate, ...]
    torch: Callable[[Tensors], Tensor | tuple[Tensor, ...]]
    in_dtensor: Callable[[tuple[Choice, ...]], bool] = lambda _choices: True


CASES: dict[str, Case] = {
    "matmul of matrices": Case(
        count=16,
        candidates=matmul.candidates((8, 16), (16, 4), MESH, "complete", dtype=F64),
        torch=lambda of: of["input"] @ of["other"],
    ),
    "matmul of a batch with a matrix": Case(
        count=25,
        candidates=matmul.candidates((4, 8, 16), (16, 4), MESH, "complete", dtype=F64),
        torch=lambda of: of["input"] @ of["other"],
        # it flattens batch dimensions, and fails where one that is not the first is sharded
        in_dtensor=lambda choices: "b1" not in choices,
    ),
    "matmul of a matrix with a vector": Case(
        count=9,
        candidates=matmul.candidates((8, 16), (16,), MESH, "complete", dtype=F64),
        torch=lambda of: of["input"] @ of["other"],
    ),
    "matmul of vectors": Case(
        count=4,
        candidates=matmul.candidates((16,), (16,), MESH, "complete", dtype=F64),
        torch=lambda of: of["input"] @ of["other"],
    ),
    "matmul of batches that broadcast": Case(
        count=36,
        candidates=matmul.candidates((4, 1, 4, 8), (4, 8, 4), MESH, "complete", dtype=F64),
        torch=lambda of: of["input"] @ of["other"],
        # it expands and flattens batch dimensions, and gathers the second
        in_dtensor=lambda choices: "b1" not in choices,
    ),
    "matmul of a vector with a batch": Case(
        count=16,
        candidates=matmul.candidates((8,), (4, 8, 4), MESH, "complete", dtype=F64),
        torch=lambda of: of["input"] @ of["other"],
        in_dtensor=lambda choices: "j" not in choices,  # it folds the batch into the rows
    ),
    "bmm": Case(
        count=25,
        candidates=bmm.candidates((4, 8, 16), (4, 16, 8), MESH, "complete", dtype=F64),
        torch=lambda of: torch.bmm(of["input"], of["other"]),
    ),
    "addmm with a bias": Case(
        count=16,
        candidates=addmm.candidates((4,), (8, 16), (16, 4), MESH, "complete", beta=3, alpha=2, dtype=F64),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"], beta=3, alpha=2),
    ),
    "addmm that leaves out what is added": Case(
        count=16,
        candidates=addmm.candidates((4,), (8, 16), (16, 4), MESH, "complete", beta=0, alpha=2, dtype=F64),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"], beta=0, alpha=2),
    ),
    "addmm with a matrix": Case(
        count=16,
        candidates=addmm.candidates((8, 4), (8, 16), (16, 4), MESH, "complete", dtype=F64),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"]),
    ),
    "addmm with a column": Case(
        count=16,
        candidates=addmm.candidates((8, 1), (8, 16), (16, 4), MESH, "complete", dtype=F64),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"]),
    ),
    "conv2d": Case(
        count=16,
        candidates=conv2d.candidates((4, 4, 6, 6), (8, 4, 3, 3), MESH, "complete", padding=1, dtype=F64),
        torch=lambda of: F.conv2d(of["input"], of["weight"], of["bias"], padding=1),
        in_dtensor=lambda choices: set(choices) == {"batch", None},  # nor over two axes
    ),
    "conv2d with a stride, dilated, without a bias": Case(
        count=16,
        candidates=conv2d.candidates(
            (4, 4, 7, 9), (8, 4, 3, 2), MESH, "complete", bias=False, stride=2, dilation=(1, 3), dtype=F64
        ),
        torch=lambda of: F.conv2d(of["input"], of["weight"], stride=2, dilation=(1, 3)),
        in_dtensor=lambda choices: set(choices) == {"batch", None},  # nor over two axes
    ),
    "conv2d of groups": Case(
        count=9,
        candidates=conv2d.candidates((4, 8, 5, 5), (4, 2, 3, 3), MESH, "complete", groups=4, dtype=F64),
        torch=lambda of: F.conv2d(of["input"], of["weight"], of["bias"], groups=4),
        in_dtensor=lambda choices: set(choices) == {"batch", None},
    ),
    "embedding": Case(
        count=36,
        candidates=embedding.candidates((4, 4, 4), 16, 8, MESH, "complete", dtype=F64),
        torch=lambda of: F.embedding(of["input"], of["weight"]),
        in_dtensor=lambda choices: choices != ("v", "v"),  # its mask is for one axis
    ),
    "embedding with a padding row": Case(
        count=16,
        candidates=embedding.candidates((8,), 16, 4, MESH, "complete", padding_idx=-6, dtype=F64),
        torch=lambda of: F.embedding(of["input"], of["weight"], padding_idx=10),
        in_dtensor=lambda choices: choices != ("v", "v"),
    ),
    "layer_norm": Case(
        count=16,
        candidates=layer_norm.candidates((4, 4, 4, 8), (8,), MESH, "complete", dtype=F64),
        torch=lambda of: F.layer_norm(of["input"], (8,), of["weight"], of["bias"]),
    ),
    "layer_norm of two dimensions, without a bias": Case(
        count=4,
        candidates=layer_norm.candidates((4, 4, 8), (4, 8), MESH, "complete", bias=False, dtype=F64),
        torch=lambda of: F.layer_norm(of["input"], (4, 8), of["weight"]),
    ),
    "layer_norm without parameters": Case(
        count=4,
        candidates=layer_norm.candidates(
            (4, 8), (8,), MESH, "complete", elementwise_affine=False, eps=1e-2, dtype=F64
        ),
        torch=lambda of: F.layer_norm(of["input"], (8,), eps=1e-2),
    ),
    "batch_norm": Case(
        count=9,
        candidates=batch_norm.candidates((4, 8, 3, 3), MESH, "complete", momentum=0.3, dtype=F64),
        torch=lambda of: F.batch_norm(
            of["input"],
            of["running_mean"],
            of["running_var"],
            of["weight"],
            of["bias"],
            training=True,
            momentum=0.3,
        ),
        in_dtensor=lambda choices: "batch" not in choices,
    ),
    "batch_norm of a matrix, without parameters": Case(
        count=9,
        candidates=batch_norm.candidates(
            (8, 4), MESH, "complete", affine=False, track_running_stats=False, eps=1e-2, dtype=F64
        ),
        torch=lambda of: F.batch_norm(of["input"], None, None, training=True, eps=1e-2),
        in_dtensor=lambda choices: "batch" not in choices,
    ),
    "view that flattens": Case(
        count=9,
        candidates=view.candidates((4, 8, 4), (32, -1), MESH, dtype=F64),
        torch=lambda of: of["input"].view(32, 4),
    ),
    "view that splits": Case(
        count=9,
        candidates=view.candidates((4, 32), (4, 1, 8, 4), MESH, dtype=F64),
        torch=lambda of: of["input"].view(4, 1, 8, 4),
    ),
    "view that cuts elsewhere": Case(
        count=3,
        candidates=view.candidates((6, 4), (4, 6), MESH, dtype=F64),
        torch=lambda of: of["input"].view(4, 6),
    ),
    "permute": Case(
        count=16,
        candidates=permute.candidates((4, 8, 4), (2, 0, -2), MESH, dtype=F64),
        torch=lambda of: of["input"].permute(2, 0, 1),
    ),
    "transpose": Case(
        count=16,
        candidates=transpose.candidates((4, 8, 4), 0, -1, MESH, dtype=F64),
        torch=lambda of: of["input"].transpose(0, 2),
    ),
    "split into even pieces and a rest": Case(
        count=4,
        candidates=split.candidates((4, 7), 3, MESH, dim=-1, dtype=F64),
        torch=lambda of: of["input"].split(3, -1),
    ),
    "split by sizes": Case(
        count=9,
        candidates=split.candidates((4, 8, 4), (1, 3), MESH, dtype=F64),
        torch=lambda of: of["input"].split((1, 3)),
    ),
    "softmax": Case(
        count=9,
        candidates=softmax.candidates((4, 8, 4), 1, MESH, dtype=F64),
        torch=lambda of: of["input"].softmax(1),
    ),
    "sum": Case(
        count=16,
        candidates=sum_.candidates((4, 8, 4), (0, -1), MESH, dtype=F64),
        torch=lambda of: of["input"].sum((0, 2)),
    ),
    "sum that keeps dimensions": Case(
        count=9,
        candidates=sum_.candidates((4, 8), (1,), MESH, keepdim=True, dtype=F64),
        torch=lambda of: of["input"].sum(1, keepdim=True),
    ),
    "sum of everything": Case(
        count=9,
        candidates=sum_.candidates((4, 8), (0, 1), MESH, dtype=F64),
        torch=lambda of: of["input"].sum((0, 1)),
    ),
    "getitem": Case(
        count=9,
        candidates=getitem.candidates((4, 5, 8, 3), (slice(0, 4), None, 1, ..., slice(2)), MESH, dtype=F64),
        torch=lambda of: of["input"][0:4, None, 1, ..., :2],
    ),
    "getitem by a number": Case(
        count=4,
        candidates=getitem.candidates((3, 8), -1, MESH, dtype=F64),
        torch=lambda of: of["input"][-1],
    ),
    "elementwise of one": Case(
        count=9,
        candidates=elementwise.candidates([(4, 8)], MESH, function=F.gelu, dtype=F64),
        torch=lambda of: F.gelu(of["input"]),
    ),
    "elementwise of two that broadcast": Case(
        count=9,
        candidates=elementwise.candidates([(4, 1), (8,)], MESH, function=torch.mul, dtype=F64),
        torch=lambda of: of["input_0"] * of["input_1"],
    ),
    "elementwise of three": Case(
        count=16,
        candidates=elementwise.candidates([(4, 8, 4), (4,), (8, 4)], MESH, function=torch.addcmul, dtype=F64),
        torch=lambda of: torch.addcmul(of["input_0"], of["input_1"], of["input_2"]),
    ),
}
