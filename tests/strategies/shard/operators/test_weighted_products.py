"""Products: ColossalAI's sets by name, the complete ones by number, and what cannot be multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from strategies import StrategyError
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.operation import LocalOperands
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.convolution_and_embedding import conv2d, embedding
from strategies.shard.operators.matrix_products import addmm, bmm, matmul
from strategies.shard.operators.module_operations import module_operation
from tests.rank_pool import RankPool
from tests.strategies.shard.shard_ranks import placements_of_dtensor, require_equal

IN_ROWS = {
    "S0S1 = S0R x RS1",
    "S1S0 = S1R x RS0",
    "S0R = S0S1 x S1R",
    "S1R = S1S0 x S0R",
    "S01R = S01R x RR",
    "RS0 = RS1 x S1S0",
    "RS1 = RS0 x S0S1",
    "RR = RS0 x S0R",
    "RR = RS1 x S1R",
    "RS0 = RR x RS0",
    "RS1 = RR x RS1",
    "RR = RS01 x S01R",
    "RS01 = RR x RS01",
    "RR = RR x RR",
}
MATRICES = {f"{name}_0" if name.startswith("S") else name for name in IN_ROWS}
BATCHED = {
    "Sb01 = Sb01 x Sb01",
    "Sb0Si1 = Sb0Si1 x Sb0",
    "Sb1Si0 = Sb1Si0 x Sb1",
    "Sb0Sj1 = Sb0R x Sb0Sj1",
    "Sb1Sj0 = Sb1R x Sb1Sj0",
    "Sb0R = Sb0Sk1 x Sb0Sk1",
    "Sb1R = Sb1Sk0 x Sb1Sk0",
}
CLASSIC: dict[str, tuple[tuple[ShardingCandidate, ...], set[str]]] = {
    "matmul of matrices": (candidates(matmul((4, 8), (8, 16)), (2, 2)), MATRICES),
    "matmul of batches": (candidates(matmul((4, 8, 16), (4, 16, 8)), (2, 2)), BATCHED),
    "bmm": (candidates(bmm((4, 8, 16), (4, 16, 8)), (2, 2)), BATCHED),
    "bmm on one axis": (candidates(bmm((4, 8, 16), (4, 16, 8)), (1, 4)), {"Sb1 = Sb1 x Sb1"}),
    "bmm that cannot be cut": (candidates(bmm((3, 5, 7), (3, 7, 5)), (2, 2)), {"R = R x R"}),
    "addmm": (candidates(addmm((16,), (4, 8), (8, 16)), (2, 2)), MATRICES),
    "conv2d": (
        candidates(conv2d((4, 4, 64, 64), (16, 4, 3, 3), padding=1), (2, 2)),
        IN_ROWS | {"S0R = S0R x RR", "S1R = S1R x RR"},
    ),
    "embedding": (
        candidates(embedding((4, 16, 16), 16, 32), (2, 2)),
        {
            "RR = R x RR",
            *(f"S{axis}R = S{axis} x RR_{dim}" for axis in (0, 1) for dim in range(3)),
            *(f"S01R = S01 x RR_{dim}" for dim in range(3)),
            *(f"S0S1 = S0 x RS1_{dim}" for dim in range(3)),
            *(f"S1S0 = S1 x RS0_{dim}" for dim in range(3)),
            *(f"RS{axes} = R x RS{axes}" for axes in ("0", "1", "01")),
        },
    ),
}


@pytest.mark.parametrize(("found", "names"), CLASSIC.values(), ids=CLASSIC)
def test_classic_is_the_set_of_the_peer(found: tuple[ShardingCandidate, ...], names: set[str]) -> None:
    assert len(found) == len(names)
    assert {candidate.name for candidate in found} == names


Counted = Callable[[Any], tuple[ShardingCandidate, ...]]
COUNTS: dict[str, tuple[Counted, int, int]] = {
    "matmul of matrices": (lambda mode: candidates(matmul((4, 8), (8, 16)), (2, 2), mode), 14, 16),
    "matmul of three batch dimensions with a matrix": (
        lambda mode: candidates(matmul((4, 4, 4, 8), (8, 16)), (2, 2), mode),
        24,
        36,
    ),
    "matmul of two batch dimensions": (
        lambda mode: candidates(matmul((4, 4, 4, 8), (4, 4, 8, 4)), (2, 2), mode),
        14,
        36,
    ),
    "matmul of vectors": (lambda mode: candidates(matmul((8,), (8,)), (2, 2), mode), 4, 4),
    "bmm": (lambda mode: candidates(bmm((4, 8, 16), (4, 16, 8)), (2, 2), mode), 7, 25),
    "bmm on three axes": (lambda mode: candidates(bmm((8, 8, 8), (8, 8, 8)), (2, 2, 2), mode), 37, 125),
    "bmm with an odd batch": (lambda mode: candidates(bmm((3, 4, 4), (3, 4, 4)), (2, 2), mode), 1, 16),
    "addmm": (lambda mode: candidates(addmm((16,), (4, 8), (8, 16)), (2, 2), mode), 14, 16),
    "addmm on one axis": (lambda mode: candidates(addmm((16,), (4, 8), (8, 16)), (4,), mode), 4, 4),
    "conv2d": (lambda mode: candidates(conv2d((4, 4, 8, 8), (16, 4, 3, 3)), (2, 2), mode), 16, 16),
    "conv2d of an image of three channels": (
        lambda mode: candidates(conv2d((4, 3, 8, 8), (16, 3, 3, 3)), (2, 2), mode),
        9,
        9,
    ),
    "conv2d, depthwise": (
        lambda mode: candidates(conv2d((4, 8, 8, 8), (8, 1, 3, 3), groups=8), (2, 2), mode),
        9,
        9,
    ),
    "conv2d of two groups, which one axis shards": (
        lambda mode: candidates(conv2d((4, 8, 8, 8), (8, 4, 3, 3), groups=2), (2, 2), mode),
        8,
        8,
    ),
    "embedding": (lambda mode: candidates(embedding((4, 16, 16), 16, 32), (2, 2), mode), 19, 36),
    "embedding of one batch dimension": (
        lambda mode: candidates(embedding((4,), 16, 32), (2, 2), mode),
        9,
        16,
    ),
    "embedding on three axes": (lambda mode: candidates(embedding((8,), 8, 8), (2, 2, 2), mode), 27, 64),
    "embedding that cannot be cut": (lambda mode: candidates(embedding((3,), 5, 7), (2, 2), mode), 1, 1),
}


@pytest.mark.parametrize(("candidates", "classic", "complete"), COUNTS.values(), ids=COUNTS)
def test_counts(candidates: Counted, classic: int, complete: int) -> None:
    few, all_ = candidates("classic"), candidates("complete")
    assert (len(few), len(all_)) == (classic, complete)
    names = {candidate.name for candidate in all_}
    assert len(names) == complete
    assert {candidate.name for candidate in few} <= names


def test_bmm_has_the_25_candidates_of_dtensor(pool4: RankPool) -> None:
    theirs = pool4.run(placements_of_dtensor, "bmk,bkn->bmn")[0]
    ours = {
        (*(operand.placements for operand in candidate.inputs), candidate.output.computed)
        for candidate in candidates(bmm((4, 8, 16), (4, 16, 8)), (2, 2), "complete")
    }
    assert len(theirs) == 25
    assert set(theirs) == ours


# bytes of float32
COMMUNICATION: dict[str, tuple[tuple[ShardingCandidate, ...], str, list[tuple[str, str, int, int, str]]]] = {
    "a batch that is broadcast sums its gradient": (
        candidates(matmul((4, 8, 16), (1, 16, 8)), (2, 2), "complete"),
        "Sb0 = Sb0 x R",
        [("backward", "all_reduce", 0, 512, "other")],
    ),
    "a batch of both needs nothing": (
        candidates(bmm((4, 8, 16), (4, 16, 8)), (2, 2)),
        "Sb01 = Sb01 x Sb01",
        [],
    ),
    "rows of one are missing in the other": (
        candidates(bmm((4, 8, 16), (4, 16, 8)), (2, 2)),
        "Sb0Si1 = Sb0Si1 x Sb0",
        [("backward", "all_reduce", 1, 1024, "other")],
    ),
    "what addmm adds is summed over rows, after the product": (
        candidates(addmm((16,), (4, 8), (8, 16)), (2, 2)),
        "S0R = S0S1 x S1R_0",
        [
            ("forward", "all_reduce", 1, 128, "output"),
            ("backward", "all_reduce", 0, 64, "input"),
            ("backward", "all_reduce", 0, 256, "mat2"),
        ],
    ),
    "groups of channels need nothing": (
        candidates(conv2d((4, 4, 8, 8), (8, 2, 3, 3), groups=2), (2, 2)),
        "RS0 = RS0 x RS0",
        [],
    ),
    "channels that enter are summed over": (
        candidates(conv2d((4, 4, 4, 4), (8, 4, 1, 1)), (2, 2)),
        "RR = RS0 x S0R",
        [("forward", "all_reduce", 0, 2048, "output")],
    ),
    "a sharded vocabulary sums the output": (
        candidates(embedding((4,), 16, 8), (2, 2), "complete"),
        "S0R = S0 x S1R_0",
        [("forward", "all_reduce", 1, 64, "output"), ("backward", "all_reduce", 0, 256, "weight")],
    ),
}


@pytest.mark.parametrize(("found", "name", "expected"), COMMUNICATION.values(), ids=COMMUNICATION)
def test_communication(
    found: tuple[ShardingCandidate, ...], name: str, expected: list[tuple[str, str, int, int, str]]
) -> None:
    (candidate,) = [each for each in found if each.name == name]
    assert [
        (each.phase, each.kind, each.mesh_axis, each.payload_bytes, each.operand)
        for each in candidate.communication
    ] == expected


FLOPS: dict[str, tuple[ShardingCandidate, int]] = {
    "matmul": (candidates(matmul((2, 3, 5), (5, 7)), (1,))[0], 2 * 2 * 3 * 5 * 7),
    "matmul of batches that broadcast": (candidates(matmul((2, 1, 3, 5), (4, 5, 7)), (1,))[0], 2 * 8 * 105),
    "bmm": (candidates(bmm((2, 3, 5), (2, 5, 7)), (1,))[0], 2 * 2 * 3 * 5 * 7),
    "addmm": (candidates(addmm((7,), (3, 5), (5, 7)), (1,))[0], 2 * 3 * 5 * 7),
    "conv2d": (candidates(conv2d((2, 4, 5, 5), (6, 2, 3, 3), groups=2), (1,))[0], 2 * 2 * 6 * 9 * 2 * 9),
    "embedding": (candidates(embedding((4,), 16, 8), (1,))[0], 0),
}


@pytest.mark.parametrize(("candidate", "forward"), FLOPS.values(), ids=FLOPS)
def test_flops_are_those_that_pytorch_counts(candidate: ShardingCandidate, forward: int) -> None:
    assert (candidate.cost.forward_flops, candidate.cost.backward_flops) == (forward, 2 * forward)


def test_integers_are_eight_bytes_and_get_no_gradient() -> None:
    candidate = candidates(embedding((4, 8), 16, 32), (2,))[0]
    integers = candidate.operand("input")
    assert (integers.type, integers.logical_shape, integers.local_bytes) == ("arg", (32,), 256)
    assert not candidate.operation.inputs[0].is_differentiable
    assert candidate.output.logical_shape == (32, 32)


CONVOLUTION = nn.Conv2d(8, 16, 3, stride=2, padding=(1, 0), groups=4, bias=False, device="meta")
EMBEDDING = nn.Embedding(16, 32, padding_idx=3, device="meta", dtype=torch.float64)
MODULES: dict[str, tuple[tuple[ShardingCandidate, ...], tuple[ShardingCandidate, ...]]] = {
    "nn.Conv2d": (
        candidates(module_operation(CONVOLUTION, (4, 8, 9, 9)), (2, 2), "complete"),
        candidates(
            conv2d((4, 8, 9, 9), (16, 2, 3, 3), bias=False, stride=2, padding=(1, 0), groups=4),
            (2, 2),
            "complete",
        ),
    ),
    "nn.Embedding": (
        candidates(module_operation(EMBEDDING, (4, 8)), (2, 2)),
        candidates(embedding((4, 8), 16, 32, padding_idx=3).typed(torch.float64), (2, 2)),
    ),
}


@pytest.mark.parametrize(("found", "expected"), MODULES.values(), ids=MODULES)
def test_a_module_says_it_all(
    found: tuple[ShardingCandidate, ...], expected: tuple[ShardingCandidate, ...]
) -> None:
    require_equal(found, expected)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown mode": (
        lambda: candidates(bmm((4, 8, 16), (4, 16, 8)), (2, 2), "all"),  # type: ignore[arg-type]
        "mode: must be classic or complete, got 'all'",
    ),
    "matrices that do not multiply": (
        lambda: candidates(matmul((4, 8), (4, 8)), (2,)),
        "other_shape: must multiply with (4, 8), which has 8 columns, got (4, 8)",
    ),
    "batches that do not broadcast": (
        lambda: candidates(matmul((3, 4, 8), (2, 8, 4)), (2,)),
        "batch dimensions: must broadcast with each other, got (3,) and (2,)",
    ),
    "bmm of different batches": (
        lambda: candidates(bmm((4, 8, 16), (2, 16, 8)), (2,)),
        "other_shape: must be (b, k, j) for an input (b, i, k) of (4, 8, 16), got (2, 16, 8)",
    ),
    "addmm of what does not multiply": (
        lambda: candidates(addmm((16,), (4, 8), (16, 8)), (2,)),
        "mat2_shape: must be (k, n) for a mat1 (m, k) of (4, 8), got (16, 8)",
    ),
    "addmm of what does not broadcast": (
        lambda: candidates(addmm((3,), (4, 8), (8, 16)), (2,)),
        "input_shape: must broadcast with each other, got (3,) and (4, 16)",
    ),
    "addmm of more than the product": (
        lambda: candidates(addmm((2, 4, 16), (4, 8), (8, 16)), (2,)),
        "input_shape: must broadcast to (4, 16), got (2, 4, 16)",
    ),
    "an image without a batch": (
        lambda: candidates(conv2d((4, 8, 8), (8, 4, 3, 3)), (2,)),
        "input_shape: must be (batch, cin, h, w), got (4, 8, 8)",
    ),
    "groups that do not divide": (
        lambda: candidates(conv2d((4, 4, 8, 8), (8, 4, 3, 3), groups=3), (2,)),
        "groups: must divide 4 channels, got 3",
    ),
    "a kernel of other channels": (
        lambda: candidates(conv2d((4, 4, 8, 8), (8, 4, 3, 3), groups=2), (2,)),
        "weight_shape: must be (cout, 2, kh, kw) with cout in 2 even groups, got (8, 4, 3, 3)",
    ),
    "a kernel larger than the image": (
        lambda: candidates(conv2d((4, 4, 2, 8), (8, 4, 3, 3)), (2,)),
        "weight_shape: must fit into an image of (2, 8), got (3, 3)",
    ),
    "a kernel that does not move": (
        lambda: candidates(conv2d((4, 4, 8, 8), (8, 4, 3, 3), stride=(0, 1)), (2,)),
        "stride, padding, dilation: must be at least 1, 0 and 1, got (0, 1), (0, 0), (1, 1)",
    ),
    "a stride for three dimensions": (
        lambda: candidates(conv2d((4, 4, 8, 8), (8, 4, 3, 3), stride=(1, 1, 1)), (2,)),
        "stride: must be one number or two, got (1, 1, 1)",
    ),
    "a module that reflects": (
        lambda: candidates(
            module_operation(nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (4, 4, 8, 8)), (2,)
        ),
        "module: must pad with a number of zeros, got (1, 1) of reflect",
    ),
    "a module that pads by name": (
        lambda: candidates(module_operation(nn.Conv2d(4, 8, 3, padding="same"), (4, 4, 8, 8)), (2,)),
        "module: must pad with a number of zeros, got 'same' of zeros",
    ),
    "a module that renormalises rows": (
        lambda: candidates(module_operation(nn.Embedding(16, 8, max_norm=2.0), (4,)), (2,)),
        "module: must have no max_norm, got 2.0",
    ),
    "a module of sparse gradients": (
        lambda: candidates(module_operation(nn.Embedding(16, 8, sparse=True), (4,)), (2,)),
        "module: must have no sparse, got True",
    ),
    "a vocabulary of nothing": (
        lambda: candidates(embedding((4,), 0, 8), (2,)),
        "num_embeddings, embedding_dim: must hold sizes of at least 1, got (0, 8)",
    ),
    "a padding row that is none": (
        lambda: candidates(embedding((4,), 16, 8, padding_idx=16), (2,)),
        "padding_idx: must be from -16 to 15, got 16",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("finish", [None, lambda term: term], ids=["in one kernel", "after a reduction"])
def test_addmm_leaves_out_what_beta_of_zero_multiplies(finish: Callable[[Tensor], Tensor] | None) -> None:
    (candidate,) = candidates(addmm((3,), (2, 4), (4, 3), beta=0), (1,))
    tensors = {
        "input": torch.tensor([torch.nan, torch.inf, 1.0], requires_grad=True),
        "mat1": torch.ones(2, 4),
        "mat2": torch.ones(4, 3),
    }
    output = candidate.operation.compute(LocalOperands(tensors=tensors, finish=finish))
    assert isinstance(output, Tensor)
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(output, torch.full((2, 3), 4.0))
    assert torch.equal(cast("Tensor", tensors["input"].grad), torch.zeros(3))
