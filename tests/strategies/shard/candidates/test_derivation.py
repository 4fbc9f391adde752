"""Communication, FLOPs and memory as they follow from placements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies import StrategyError
from strategies.estimate.machine import A100
from strategies.shard.candidates.derivation import derive
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.matrix_products import linear
from strategies.shard.operators.views import split

R, P = Replicate(), Partial()
COMPLETE = {candidate.name: candidate for candidate in candidates(linear((4, 4, 16), 32), (2, 2), "complete")}
# bytes of float32: input 1024, weight 2048, bias 128, output 2048
COMMUNICATION: dict[str, list[tuple[str, str, int, int, str]]] = {
    "RR = RR x RR": [],
    "RR = RS0 x S0R": [("forward", "all_reduce", 0, 2048, "output")],
    "RS1 = RR x RS1": [("backward", "all_reduce", 1, 1024, "input")],
    "S0R = S0R x RR_0": [
        ("backward", "all_reduce", 0, 2048, "weight"),
        ("backward", "all_reduce", 0, 128, "bias"),
    ],
    "S0R = S0S1 x S1R_1": [
        ("forward", "all_reduce", 1, 1024, "output"),
        ("backward", "all_reduce", 0, 1024, "weight"),
        ("backward", "all_reduce", 0, 128, "bias"),
    ],
    "S1S0 = S1R x RS0_0": [
        ("backward", "all_reduce", 0, 512, "input"),
        ("backward", "all_reduce", 1, 1024, "weight"),
        ("backward", "all_reduce", 1, 64, "bias"),
    ],
    "RR = RS01 x S01R": [
        ("forward", "all_reduce", 0, 2048, "output"),
        ("forward", "all_reduce", 1, 2048, "output"),
    ],
    "S01R = S01R x RR_0_1": [
        ("backward", "all_reduce", 0, 2048, "weight"),
        ("backward", "all_reduce", 1, 2048, "weight"),
        ("backward", "all_reduce", 0, 128, "bias"),
        ("backward", "all_reduce", 1, 128, "bias"),
    ],
}


@pytest.mark.parametrize(("name", "expected"), COMMUNICATION.items(), ids=COMMUNICATION)
def test_communication(name: str, expected: list[tuple[str, str, int, int, str]]) -> None:
    assert _communication(COMPLETE[name]) == expected


def test_without_a_bias_none_is_communicated() -> None:
    found = candidates(linear((4, 4, 16), 32, bias=False), (2, 2), "complete")
    assert {each.operand for candidate in found for each in candidate.communication} == {
        "input",
        "weight",
        "output",
    }


COMPUTED: dict[str, tuple[object, ...]] = {
    "RR = RS0 x S0R": ((Shard(2), R), (Shard(1), R), (R, R), (P, R)),
    "RS1 = RR x RS1": ((R, P), (R, Shard(0)), (R, Shard(0)), (R, Shard(2))),
    "S0R = S0R x RR_1": ((Shard(1), R), (P, R), (P, R), (Shard(1), R)),
}


@pytest.mark.parametrize(("name", "computed"), COMPUTED.items(), ids=COMPUTED)
def test_where_gradients_and_output_are_computed(name: str, computed: tuple[object, ...]) -> None:
    assert tuple(operand.computed for operand in COMPLETE[name].operands) == computed


COSTS: dict[str, tuple[int, int, int]] = {
    "RR = RR x RR": (16384, 32768, 1024 + 2048 + 128 + 2048),
    "RR = RS0 x S0R": (8192, 16384, 512 + 1024 + 128 + 2048),
    "S0S1 = S0R x RS1_0": (4096, 8192, 512 + 1024 + 64 + 512),
    "S01R = S01R x RR_0": (4096, 8192, 256 + 2048 + 128 + 512),
}


@pytest.mark.parametrize(("name", "expected"), COSTS.items(), ids=COSTS)
def test_flops_and_memory_of_a_rank(name: str, expected: tuple[int, int, int]) -> None:
    cost = COMPLETE[name].cost
    assert (cost.forward_flops, cost.backward_flops, cost.memory_bytes) == expected


def test_seconds_are_flops_over_rate_and_latency_plus_bytes_over_bandwidth() -> None:
    machine = replace(A100, flops_per_s=1e3, link_bytes_per_s=1e2, latency_s=0.5)
    found = candidates(linear((4, 4, 16), 32, bias=False), (4,), "complete", machine=machine)
    cost = next(each for each in found if each.name == "RR = RS0 x S0R").cost
    assert cost.compute_s == (4096 + 8192) / 1e3
    assert cost.communication_s == 0.5 + 2 * 3 / 4 * 2048 / 1e2
    assert cost.total_s == cost.compute_s + cost.communication_s
    assert cost.communicated_bytes == 2048


def test_bytes_follow_the_dtype() -> None:
    candidate = candidates(linear((4, 16), 32).typed(torch.bfloat16), (2, 2))[0]
    assert [operand.local_bytes for operand in candidate.operands] == [128, 1024, 64, 256]


# row-parallel with the output sharded over rows (sequence parallelism, arXiv:2205.05198) or over columns
WANTED: dict[str, tuple[tuple[object, ...], list[tuple[str, str, int, int, str]]]] = {
    "over rows, which sums the bias over ranks": (
        (Shard(0), R),
        [
            ("forward", "reduce_scatter", 0, 2048, "output"),
            ("backward", "all_gather", 0, 2048, "output"),
            ("backward", "all_reduce", 0, 128, "bias"),
        ],
    ),
    "over columns, which shards the bias": (
        (Shard(2), R),
        [
            ("forward", "reduce_scatter", 0, 2048, "output"),
            ("backward", "all_gather", 0, 2048, "output"),
        ],
    ),
}


@pytest.mark.parametrize(("output", "expected"), WANTED.values(), ids=WANTED)
def test_a_partial_output_is_scattered_to_where_it_is_wanted(
    output: tuple[object, ...], expected: list[tuple[str, str, int, int, str]]
) -> None:
    row_parallel = COMPLETE["RR = RS0 x S0R"]
    candidate = derive(
        row_parallel.operation,
        row_parallel.choices,
        row_parallel.mesh_shape,
        name="scattered",
        output=output,  # type: ignore[arg-type]
    )
    assert candidate.output.placements == output
    assert _communication(candidate) == expected


@pytest.mark.parametrize(
    ("choices", "output", "message"),
    [
        pytest.param(
            ("k", None),
            (P, R),
            "output: cannot be placed as Partial(sum); use Replicate or another Shard",
            id="an output that stays partial",
        ),
        pytest.param(
            ("b0", "b0"),
            None,
            "placements: dimension 0 of (2, 32) cannot be cut into 4 even shards",
            id="an uneven cut",
        ),
    ],
)
def test_refusals(choices: tuple[str | None, ...], output: tuple[object, ...] | None, message: str) -> None:
    operation = candidates(linear((2, 16), 32), (2, 2))[0].operation
    with pytest.raises(StrategyError) as error:
        derive(operation, choices, (2, 2), name="refused", output=output)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_several_outputs_cannot_be_placed() -> None:
    operation = candidates(split((4, 8), 4, dim=1), (2, 2))[0].operation
    with pytest.raises(StrategyError) as error:
        derive(operation, ("d0", None), (2, 2), name="refused", output=(R, R))
    assert str(error.value) == "output: cannot be placed where there are 2"


def _communication(candidate: ShardingCandidate) -> list[tuple[str, str, int, int, str]]:
    return [
        (each.phase, each.kind, each.mesh_axis, each.payload_bytes, each.operand)
        for each in candidate.communication
    ]
