"""One table of operators with what torch calls the same, for the tests that all of them must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.operation import Label, Operation
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.convolution_and_embedding import conv2d, embedding
from strategies.shard.operators.matrix_products import addmm, bmm, matmul
from strategies.shard.operators.norms import batch_norm, layer_norm
from strategies.shard.operators.pointwise import elementwise, softmax, sum_
from strategies.shard.operators.views import getitem, permute, split, transpose, view

Tensors: TypeAlias = Mapping[str, Tensor]
MESH = (2, 2)
F64 = torch.float64


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operator on the 2 x 2 mesh.

    Fields:
        count: of its complete candidates.
        operation: the operator.
        torch: the operator as torch has it, on operands by name.
        in_dtensor: whether DTensor, too, has a candidate with these choices, at no communication.
    """

    count: int
    operation: Operation
    torch: Callable[[Tensors], Tensor | tuple[Tensor, ...]]
    in_dtensor: Callable[[tuple[Label, ...]], bool] = lambda _choices: True

    @cached_property
    def candidates(self) -> tuple[ShardingCandidate, ...]:
        """All candidates, in double precision."""
        return candidates(self.operation.typed(F64), MESH, "complete")


CASES: dict[str, Case] = {
    "matmul of matrices": Case(
        count=16,
        operation=matmul((8, 16), (16, 4)),
        torch=lambda of: of["input"] @ of["other"],
    ),
    "matmul of a batch with a matrix": Case(
        count=25,
        operation=matmul((4, 8, 16), (16, 4)),
        torch=lambda of: of["input"] @ of["other"],
        # it flattens batch dimensions, and fails where one that is not the first is sharded
        in_dtensor=lambda choices: "b1" not in choices,
    ),
    "matmul of a matrix with a vector": Case(
        count=9,
        operation=matmul((8, 16), (16,)),
        torch=lambda of: of["input"] @ of["other"],
    ),
    "matmul of vectors": Case(
        count=4,
        operation=matmul((16,), (16,)),
        torch=lambda of: of["input"] @ of["other"],
    ),
    "matmul of batches that broadcast": Case(
        count=36,
        operation=matmul((4, 1, 4, 8), (4, 8, 4)),
        torch=lambda of: of["input"] @ of["other"],
        # it expands and flattens batch dimensions, and gathers the second
        in_dtensor=lambda choices: "b1" not in choices,
    ),
    "matmul of a vector with a batch": Case(
        count=16,
        operation=matmul((8,), (4, 8, 4)),
        torch=lambda of: of["input"] @ of["other"],
        in_dtensor=lambda choices: "j" not in choices,  # it folds the batch into the rows
    ),
    "bmm": Case(
        count=25,
        operation=bmm((4, 8, 16), (4, 16, 8)),
        torch=lambda of: torch.bmm(of["input"], of["other"]),
    ),
    "addmm with a bias": Case(
        count=16,
        operation=addmm((4,), (8, 16), (16, 4), beta=3, alpha=2),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"], beta=3, alpha=2),
    ),
    "addmm that leaves out what is added": Case(
        count=16,
        operation=addmm((4,), (8, 16), (16, 4), beta=0, alpha=2),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"], beta=0, alpha=2),
    ),
    "addmm with a matrix": Case(
        count=16,
        operation=addmm((8, 4), (8, 16), (16, 4)),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"]),
    ),
    "addmm with a column": Case(
        count=16,
        operation=addmm((8, 1), (8, 16), (16, 4)),
        torch=lambda of: torch.addmm(of["input"], of["mat1"], of["mat2"]),
    ),
    "conv2d": Case(
        count=16,
        operation=conv2d((4, 4, 6, 6), (8, 4, 3, 3), padding=1),
        torch=lambda of: F.conv2d(of["input"], of["weight"], of["bias"], padding=1),
        in_dtensor=lambda choices: set(choices) == {"batch", None},  # nor over two axes
    ),
    "conv2d with a stride, dilated, without a bias": Case(
        count=16,
        operation=conv2d((4, 4, 7, 9), (8, 4, 3, 2), bias=False, stride=2, dilation=(1, 3)),
        torch=lambda of: F.conv2d(of["input"], of["weight"], stride=2, dilation=(1, 3)),
        in_dtensor=lambda choices: set(choices) == {"batch", None},  # nor over two axes
    ),
    "conv2d of groups": Case(
        count=9,
        operation=conv2d((4, 8, 5, 5), (4, 2, 3, 3), groups=4),
        torch=lambda of: F.conv2d(of["input"], of["weight"], of["bias"], groups=4),
        in_dtensor=lambda choices: set(choices) == {"batch", None},
    ),
    "embedding": Case(
        count=36,
        operation=embedding((4, 4, 4), 16, 8),
        torch=lambda of: F.embedding(of["input"], of["weight"]),
        in_dtensor=lambda choices: choices != ("v", "v"),  # its mask is for one axis
    ),
    "embedding with a padding row": Case(
        count=16,
        operation=embedding((8,), 16, 4, padding_idx=-6),
        torch=lambda of: F.embedding(of["input"], of["weight"], padding_idx=10),
        in_dtensor=lambda choices: choices != ("v", "v"),
    ),
    "layer_norm": Case(
        count=16,
        operation=layer_norm((4, 4, 4, 8), (8,)),
        torch=lambda of: F.layer_norm(of["input"], (8,), of["weight"], of["bias"]),
    ),
    "layer_norm of two dimensions, without a bias": Case(
        count=4,
        operation=layer_norm((4, 4, 8), (4, 8), bias=False),
        torch=lambda of: F.layer_norm(of["input"], (4, 8), of["weight"]),
    ),
    "layer_norm without parameters": Case(
        count=4,
        operation=layer_norm((4, 8), (8,), elementwise_affine=False, eps=1e-2),
        torch=lambda of: F.layer_norm(of["input"], (8,), eps=1e-2),
    ),
    "batch_norm": Case(
        count=9,
        operation=batch_norm((4, 8, 3, 3), momentum=0.3),
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
        operation=batch_norm((8, 4), affine=False, track_running_stats=False, eps=1e-2),
        torch=lambda of: F.batch_norm(of["input"], None, None, training=True, eps=1e-2),
        in_dtensor=lambda choices: "batch" not in choices,
    ),
    "view that flattens": Case(
        count=9,
        operation=view((4, 8, 4), (32, -1)),
        torch=lambda of: of["input"].view(32, 4),
    ),
    "view that splits": Case(
        count=9,
        operation=view((4, 32), (4, 1, 8, 4)),
        torch=lambda of: of["input"].view(4, 1, 8, 4),
    ),
    "view that cuts elsewhere": Case(
        count=3,
        operation=view((6, 4), (4, 6)),
        torch=lambda of: of["input"].view(4, 6),
    ),
    "permute": Case(
        count=16,
        operation=permute((4, 8, 4), (2, 0, -2)),
        torch=lambda of: of["input"].permute(2, 0, 1),
    ),
    "transpose": Case(
        count=16,
        operation=transpose((4, 8, 4), 0, -1),
        torch=lambda of: of["input"].transpose(0, 2),
    ),
    "split into even pieces and a rest": Case(
        count=4,
        operation=split((4, 7), 3, dim=-1),
        torch=lambda of: of["input"].split(3, -1),
    ),
    "split by sizes": Case(
        count=9,
        operation=split((4, 8, 4), (1, 3)),
        torch=lambda of: of["input"].split((1, 3)),
    ),
    "softmax": Case(
        count=9,
        operation=softmax((4, 8, 4), 1),
        torch=lambda of: of["input"].softmax(1),
    ),
    "sum": Case(
        count=16,
        operation=sum_((4, 8, 4), (0, -1)),
        torch=lambda of: of["input"].sum((0, 2)),
    ),
    "sum that keeps dimensions": Case(
        count=9,
        operation=sum_((4, 8), (1,), keepdim=True),
        torch=lambda of: of["input"].sum(1, keepdim=True),
    ),
    "sum of everything": Case(
        count=9,
        operation=sum_((4, 8), (0, 1)),
        torch=lambda of: of["input"].sum((0, 1)),
    ),
    "getitem": Case(
        count=9,
        operation=getitem((4, 5, 8, 3), (slice(0, 4), None, 1, ..., slice(2))),
        torch=lambda of: of["input"][0:4, None, 1, ..., :2],
    ),
    "getitem by a number": Case(
        count=4,
        operation=getitem((3, 8), -1),
        torch=lambda of: of["input"][-1],
    ),
    "elementwise of one": Case(
        count=9,
        operation=elementwise([(4, 8)], function=F.gelu),
        torch=lambda of: F.gelu(of["input"]),
    ),
    "elementwise of two that broadcast": Case(
        count=9,
        operation=elementwise([(4, 1), (8,)], function=torch.mul),
        torch=lambda of: of["input_0"] * of["input_1"],
    ),
    "elementwise of three": Case(
        count=16,
        operation=elementwise([(4, 8, 4), (4,), (8, 4)], function=torch.addcmul),
        torch=lambda of: torch.addcmul(of["input_0"], of["input_1"], of["input_2"]),
    ),
}
