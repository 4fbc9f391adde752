"""Products: the peer's sets by name, the complete ones by number, and what cannot be multiplied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor._ops._einsum_strategy import gen_einsum_strategies

from strategies import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.operation import LocalOperands
from strategies.shard.operators import addmm, bmm, conv2d, embedding, matmul
from tests.rank_pool import RankPool
from tests.strategies.shard.shard_ranks import mesh_of

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
CLASSIC: dict[str, tuple[tuple[Candidate, ...], set[str]]] = {
    "matmul of matrices": (matmul.candidates((4, 8), (8, 16), (2, 2)), MATRICES),
    "matmul of batches": (matmul.candidates((4, 8, 16), (4, 16, 8), (2, 2)), BATCHED),
    "bmm": (bmm.candidates((4, 8, 16), (4, 16, 8), (2, 2)), BATCHED),
    "bmm on one axis": (bmm.candidates((4, 8, 16), (4, 16, 8), (1, 4)), {"Sb1 = Sb1 x Sb1"}),
    "bmm that cannot be cut": (bmm.candidates((3, 5, 7), (3, 7, 5), (2, 2)), {"R = R x R"}),
    "addmm": (addmm.candidates((16,), (4, 8), (8, 16), (2, 2)), MATRICES),
    "conv2d": (
        conv2d.candidates((4, 4, 64, 64), (16, 4, 3, 3), (2, 2), padding=1),
        IN_ROWS | {"S0R = S0R x RR", "S1R = S1R x RR"},
    ),
    "embedding": (
        embedding.candidates((4, 16, 16), 16, 32, (2, 2)),
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
def test_classic_is_the_set_of_the_peer(found: tuple[Candidate, ...], names: set[str]) -> None:
    assert len(found) == len(names)
    assert {candidate.name for candidate in found} == names


Counted = Callable[[Any], tuple[Candidate, ...]]
COUNTS: dict[str, tuple[Counted, int, int]] = {
    "matmul of matrices": (lambda mode: matmul.candidates((4, 8), (8, 16), (2, 2), mode), 14, 16),
    "matmul of three batch dimensions with a matrix": (
        lambda mode: matmul.candidates((4, 4, 4, 8), (8, 16), (2, 2), mode),
        24,
        36,
    ),
    "matmul of two batch dimensions": (
        lambda mode: matmul.candidates((4, 4, 4, 8), (4, 4, 8, 4), (2, 2), mode),
        14,
        36,
    ),
    "matmul of vectors": (lambda mode: matmul.candidates((8,), (8,), (2, 2), mode), 4, 4),
    "bmm": (lambda mode: bmm.candidates((4, 8, 16), (4, 16, 8), (2, 2), mode), 7, 25),
    "bmm on three axes": (lambda mode: bmm.candidates((8, 8, 8), (8, 8, 8), (2, 2, 2), mode), 37, 125),
    "bmm with an odd batch": (lambda mode: bmm.candidates((3, 4, 4), (3, 4, 4), (2, 2), mode), 1, 16),
    "addmm": (lambda mode: addmm.candidates((16,), (4, 8), (8, 16), (2, 2), mode), 14, 16),
    "addmm on one axis": (lambda mode: addmm.candidates((16,), (4, 8), (8, 16), (4,), mode), 4, 4),
    "conv2d": (lambda mode: conv2d.candidates((4, 4, 8, 8), (16, 4, 3, 3), (2, 2), mode), 16, 16),
    "conv2d of an image of three channels": (
        lambda mode: conv2d.candidates((4, 3, 8, 8), (16, 3, 3, 3), (2, 2), mode),
        9,
        9,
    ),
    "conv2d, depthwise": (
        lambda mode: conv2d.candidates((4, 8, 8, 8), (8, 1, 3, 3), (2, 2), mode, groups=8),
        9,
        9,
    ),
    "conv2d of two groups, which one axis shards": (
        lambda mode: conv2d.candidates((4, 8, 8, 8), (8, 4, 3, 3), (2, 2), mode, groups=2),
        8,
        8,
    ),
    "embedding": (lambda mode: embedding.candidates((4, 16, 16), 16, 32, (2, 2), mode), 19, 36),
    "embedding of one batch dimension": (
        lambda mode: embedding.candidates((4,), 16, 32, (2, 2), mode),
        9,
        16,
    ),
    "embedding on three axes": (lambda mode: embedding.candidates((8,), 8, 8, (2, 2, 2), mode), 27, 64),
    "embedding that cannot be cut": (lambda mode: embedding.candidates((3,), 5, 7, (2, 2), mode), 1, 1),
}


@pytest.mark.parametrize(("candidates", "classic", "complete"), COUNTS.values(), ids=COUNTS)
def test_counts(candidates: Counted, classic: int, complete: int) -> None:
    few, all_ = candidates("classic"), candidates("complete")
    assert (len(few), len(all_)) == (classic, complete)
    names = {candidate.name for candidate in all_}
    assert len(names) == complete
    assert {candidate.name for candidate in few} <= names


def _bmm_of_dtensor(_rank: int) -> list[tuple[Any, ...]]:
    mesh = mesh_of((2, 2))
    strategies = gen_einsum_strategies("bmk,bkn->bmn", mesh).strategies
    return [
        tuple(
            spec.placements
            for spec in (*(strategy.input_specs or ()), strategy.output_spec)
            if spec is not None
        )
        for strategy in strategies
    ]


def test_bmm_has_the_25_candidates_of_dtensor(pool4: RankPool) -> None:
    theirs = pool4.run(_bmm_of_dtensor)[0]
    ours = {
        (*(operand.placements for operand in candidate.inputs), candidate.output.computed)
        for candidate in bmm.candidates((4, 8, 16), (4, 16, 8), (2, 2), "complete")
    }
    assert len(theirs) == 25
    assert set(theirs) == ours


# bytes of float32
COMMUNICATION: dict[str, tuple[tuple[Candidate, ...], str, list[tuple[str, str, int, int, str]]]] = {
    "a batch that is broadcast sums its gradient": (
        matmul.candidates((4, 8, 16), (1, 16, 8), (2, 2), "complete"),
        "Sb0 = Sb0 x R",
        [("backward", "all_reduce", 0, 512, "other")],
    ),
    "a batch of both needs nothing": (
        bmm.candidates((4, 8, 16), (4, 16, 8), (2, 2)),
        "Sb01 = Sb01 x Sb01",
        [],
    ),
    "rows of one are missing in the other": (
        bmm.candidates((4, 8, 16), (4, 16, 8), (2, 2)),
        "Sb0Si1 = Sb0Si1 x Sb0",
        [("backward", "all_reduce", 1, 1024, "other")],
    ),
    "what addmm adds is summed over rows, after the product": (
        addmm.candidates((16,), (4, 8), (8, 16), (2, 2)),
        "S0R = S0S1 x S1R_0",
        [
            ("forward", "all_reduce", 1, 128, "output"),
            ("backward", "all_reduce", 0, 64, "input"),
            ("backward", "all_reduce", 0, 256, "mat2"),
        ],
    ),
    "groups of channels need nothing": (
        conv2d.candidates((4, 4, 8, 8), (8, 2, 3, 3), (2, 2), groups=2),
        "RS0 = RS0 x RS0",
        [],
    ),
    "channels that enter are summed over": (
        conv2d.candidates((4, 4, 4, 4), (8, 4, 1, 1), (2, 2)),
        "RR = RS0 x S0R",
        [("forward", "all_reduce", 0, 2048, "output")],
    ),
    "a sharded vocabulary sums the output": (
        embedding.candidates((4,), 16, 8, (2, 2), "complete"),
        "S0R = S0 x S1R_0",
        [("forward", "all_reduce", 1, 64, "output"), ("backward", "all_reduce", 0, 256, "weight")],
    ),
}


@pytest.mark.parametrize(("found", "name", "expected"), COMMUNICATION.values(), ids=COMMUNICATION)
def test_communication(
    found: tuple[Candidate, ...], name: str, expected: list[tuple[str, str, int, int, str]]
) -> None:
    (candidate,) = [each for each in found if each.name == name]
    assert [
        (each.phase, each.kind, each.mesh_axis, each.payload_bytes, each.operand)
        for each in candidate.communication
    ] == expected


FLOPS: dict[str, tuple[Candidate, int]] = {
    "matmul": (matmul.candidates((2, 3, 5), (5, 7), (1,))[0], 2 * 2 * 3 * 5 * 7),
    "matmul of batches that broadcast": (matmul.candidates((2, 1, 3, 5), (4, 5, 7), (1,))[0], 2 * 8 * 105),
    "bmm": (bmm.candidates((2, 3, 5), (2, 5, 7), (1,))[0], 2 * 2 * 3 * 5 * 7),
    "addmm": (addmm.candidates((7,), (3, 5), (5, 7), (1,))[0], 2 * 3 * 5 * 7),
    "conv2d": (conv2d.candidates((2, 4, 5, 5), (6, 2, 3, 3), (1,), groups=2)[0], 2 * 2 * 6 * 9 * 2 * 9),
    "embedding": (embedding.candidates((4,), 16, 8, (1,))[0], 0),
}


@pytest.mark.parametrize(("candidate", "forward"), FLOPS.values(), ids=FLOPS)
def test_flops_are_those_that_pytorch_counts(candidate: Candidate, forward: int) -> None:
    assert (candidate.cost.forward_flops, candidate.cost.backward_flops) == (forward, 2 * forward)


def test_integers_are_eight_bytes_and_get_no_gradient() -> None:
    candidate = embedding.candidates((4, 8), 16, 32, (2,))[0]
    integers = candidate.operand("input")
    assert (integers.type, integers.logical_shape, integers.local_bytes) == ("arg", (32,), 256)
    assert not candidate.operation.inputs[0].is_differentiable
    assert candidate.output.logical_shape == (32, 32)


CONVOLUTION = nn.Conv2d(8, 16, 3, stride=2, padding=(1, 0), groups=4, bias=False, device="meta")
EMBEDDING = nn.Embedding(16, 32, padding_idx=3, device="meta", dtype=torch.float64)
MODULES: dict[str, tuple[tuple[Candidate, ...], tuple[Candidate, ...]]] = {
    "nn.Conv2d": (
        conv2d.from_module(CONVOLUTION, (4, 8, 9, 9), (2, 2), "complete"),
        conv2d.candidates(
            (4, 8, 9, 9),
            (16, 2, 3, 3),
            (2, 2),
            "complete",
            bias=False,
            stride=2,
            padding=(1, 0),
            groups=4,
        ),
    ),
    "nn.Embedding": (
        embedding.from_module(EMBEDDING, (4, 8), (2, 2)),
        embedding.candidates((4, 8), 16, 32, (2, 2), padding_idx=3, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize(("found", "expected"), MODULES.values(), ids=MODULES)
def test_a_module_says_it_all(found: tuple[Candidate, ...], expected: tuple[Candidate, ...]) -> None:
    assert [(each.name, each.operands, each.communication) for each in found] == [
        (each.name, each.operands, each.communication) for each in expected
    ]
    compute, wanted = (each[0].operation.compute for each in (found, expected))
    assert isinstance(compute, partial)
    assert isinstance(wanted, partial)
    assert compute.keywords == wanted.keywords


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown mode": (
        lambda: bmm.candidates((4, 8, 16), (4, 16, 8), (2, 2), "all"),  # type: ignore[arg-type]
        "mode: must be classic or complete, got 'all'",
    ),
    "matrices that do not multiply": (
        lambda: matmul.candidates((4, 8), (4, 8), (2,)),
        "other_shape: must multiply with (4, 8), which has 8 columns, got (4, 8)",
    ),
    "batches that do not broadcast": (
        lambda: matmul.candidates((3, 4, 8), (2, 8, 4), (2,)),
        "batch dimensions: must broadcast with each other, got (3,) and (2,)",
    ),
    "bmm of different batches": (
        lambda: bmm.candidates((4, 8, 16), (2, 16, 8), (2,)),
        "other_shape: must be (b, k, j) for an input (b, i, k) of (4, 8, 16), got (2, 16, 8)",
    ),
    "addmm of what does not multiply": (
        lambda: addmm.candidates((16,), (4, 8), (16, 8), (2,)),
        "mat2_shape: must be (k, n) for a mat1 (m, k) of (4, 8), got (16, 8)",
    ),
    "addmm of what does not broadcast": (
        lambda: addmm.candidates((3,), (4, 8), (8, 16), (2,)),
        "input_shape: must broadcast with each other, got (3,) and (4, 16)",
    ),
    "addmm of more than the product": (
        lambda: addmm.candidates((2, 4, 16), (4, 8), (8, 16), (2,)),
        "input_shape: must broadcast to (4, 16), got (2, 4, 16)",
    ),
    "an image without a batch": (
        lambda: conv2d.candidates((4, 8, 8), (8, 4, 3, 3), (2,)),
        "input_shape: must be (batch, cin, h, w), got (4, 8, 8)",
    ),
    "groups that do not divide": (
        lambda: conv2d.candidates((4, 4, 8, 8), (8, 4, 3, 3), (2,), groups=3),
        "groups: must divide 4 channels, got 3",
    ),
    "a kernel of other channels": (
        lambda: conv2d.candidates((4, 4, 8, 8), (8, 4, 3, 3), (2,), groups=2),
        "weight_shape: must be (cout, 2, kh, kw) with cout in 2 even groups, got (8, 4, 3, 3)",
    ),
    "a kernel larger than the image": (
        lambda: conv2d.candidates((4, 4, 2, 8), (8, 4, 3, 3), (2,)),
        "weight_shape: must fit into an image of (2, 8), got (3, 3)",
    ),
    "a kernel that does not move": (
        lambda: conv2d.candidates((4, 4, 8, 8), (8, 4, 3, 3), (2,), stride=(0, 1)),
        "stride, padding, dilation: must be at least 1, 0 and 1, got (0, 1), (0, 0), (1, 1)",
    ),
    "a stride for three dimensions": (
        lambda: conv2d.candidates((4, 4, 8, 8), (8, 4, 3, 3), (2,), stride=(1, 1, 1)),
        "stride: must be one number or two, got (1, 1, 1)",
    ),
    "a module that reflects": (
        lambda: conv2d.from_module(nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (4, 4, 8, 8), (2,)),
        "module: must pad with a number of zeros, got (1, 1) of reflect",
    ),
    "a module that pads by name": (
        lambda: conv2d.from_module(nn.Conv2d(4, 8, 3, padding="same"), (4, 4, 8, 8), (2,)),
        "module: must pad with a number of zeros, got 'same' of zeros",
    ),
    "a module that renormalises rows": (
        lambda: embedding.from_module(nn.Embedding(16, 8, max_norm=2.0), (4,), (2,)),
        "module: must have no max_norm, got 2.0",
    ),
    "a module of sparse gradients": (
        lambda: embedding.from_module(nn.Embedding(16, 8, sparse=True), (4,), (2,)),
        "module: must have no sparse, got True",
    ),
    "a vocabulary of nothing": (
        lambda: embedding.candidates((4,), 0, 8, (2,)),
        "num_embeddings, embedding_dim: must hold sizes of at least 1, got (0, 8)",
    ),
    "a padding row that is none": (
        lambda: embedding.candidates((4,), 16, 8, (2,), padding_idx=16),
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
    (candidate,) = addmm.candidates((3,), (2, 4), (4, 3), (1,), beta=0)
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
