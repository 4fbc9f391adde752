"""Norms: ColossalAI's sets by name, statistics of the whole batch, and what cannot be normalised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies import StrategyError
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.execution import apply, distribute
from strategies.shard.candidates.operation import LocalOperands
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.module_operations import module_operation
from strategies.shard.operators.norms import batch_norm, layer_norm
from tests.rank_pool import RankPool
from tests.strategies.shard.shard_ranks import mesh_of, require_equal

CLASSIC: dict[str, tuple[tuple[ShardingCandidate, ...], set[str]]] = {
    "layer_norm of a matrix": (
        candidates(layer_norm((4, 16), (16,)), (2, 2)),
        {"RR = RR x R", *(f"[S{axes}, R] = [S{axes}, R] x [R]" for axes in ("0", "1", "01"))},
    ),
    "layer_norm over two dimensions, without a bias": (
        candidates(layer_norm((4, 8, 16), (8, 16), bias=False), (2,)),
        {"RR = RR x R", "[S0, R, R] = [S0, R, R] x [R, R]"},
    ),
    "layer_norm over everything": (candidates(layer_norm((8, 16), (8, 16)), (2, 2)), {"RR = RR x R"}),
    "batch_norm": (
        candidates(batch_norm((4, 16, 64, 64)), (2, 2)),
        {
            "RR = RR x R",
            *(f"RS{axes} = RS{axes} x S{axes}" for axes in ("0", "1", "01")),
            *(f"S{axes}R = S{axes}R x R WITH SYNC_BN" for axes in ("0", "1", "01")),
            "S0S1 = S0S1 x S1 WITH SYNC_BN",
            "S1S0 = S1S0 x S0 WITH SYNC_BN",
        },
    ),
    "batch_norm without parameters": (
        candidates(batch_norm((3, 16), affine=False, track_running_stats=False), (2,)),
        {"RR = RR", "RS0 = RS0"},
    ),
}


@pytest.mark.parametrize(("found", "names"), CLASSIC.values(), ids=CLASSIC)
def test_classic_is_the_set_of_the_peer(found: tuple[ShardingCandidate, ...], names: set[str]) -> None:
    assert len(found) == len(names)
    assert {candidate.name for candidate in found} == names


Counted = Callable[[Any], tuple[ShardingCandidate, ...]]
COUNTS: dict[str, tuple[Counted, int]] = {
    "layer_norm of a matrix": (lambda mode: candidates(layer_norm((4, 16), (16,)), (2, 2), mode), 4),
    "layer_norm of four dimensions": (
        lambda mode: candidates(layer_norm((4, 4, 4, 16), (16,)), (2, 2), mode),
        16,
    ),
    "layer_norm on three axes": (lambda mode: candidates(layer_norm((8, 8, 16), (16,)), (2, 2, 2), mode), 27),
    "layer_norm that cannot be cut": (lambda mode: candidates(layer_norm((3, 16), (16,)), (2, 2), mode), 1),
    "batch_norm": (lambda mode: candidates(batch_norm((4, 16, 64, 64)), (2, 2), mode), 9),
    "batch_norm on three axes": (lambda mode: candidates(batch_norm((8, 8)), (2, 2, 2), mode), 27),
    "batch_norm that cannot be cut": (lambda mode: candidates(batch_norm((3, 5, 8, 8)), (2, 2), mode), 1),
}


@pytest.mark.parametrize(("candidates", "count"), COUNTS.values(), ids=COUNTS)
def test_the_peer_misses_none(candidates: Counted, count: int) -> None:
    names = [candidate.name for candidate in candidates("classic")]
    assert len(set(names)) == len(names) == count
    assert [candidate.name for candidate in candidates("complete")] == names


# bytes of float32
COMMUNICATION: dict[str, tuple[tuple[ShardingCandidate, ...], str, list[tuple[str, int, int, str]]]] = {
    "layer_norm sums the gradients of its parameters": (
        candidates(layer_norm((4, 16), (16,)), (2, 2)),
        "[S0, R] = [S0, R] x [R]",
        [("backward", 0, 64, "weight"), ("backward", 0, 64, "bias")],
    ),
    "batch_norm of channels needs nothing": (
        candidates(batch_norm((4, 16, 8, 8)), (2, 2)),
        "RS01 = RS01 x S01",
        [],
    ),
    "batch_norm synchronises statistics, of its own channels": (
        candidates(batch_norm((4, 16, 8, 8)), (2, 2)),
        "S0S1 = S0S1 x S1 WITH SYNC_BN",
        [
            (phase, 0, 32, operand)
            for phase, operands in (
                ("forward", ("mean", "variance")),
                ("backward", ("mean", "variance", "weight", "bias")),
            )
            for operand in operands
        ],
    ),
    "statistics of half precision are in single": (
        candidates(batch_norm((4, 16), affine=False).typed(torch.bfloat16), (2,)),
        "S0R = S0R x R WITH SYNC_BN",
        [(phase, 0, 64, operand) for phase in ("forward", "backward") for operand in ("mean", "variance")],
    ),
}


@pytest.mark.parametrize(("found", "name", "expected"), COMMUNICATION.values(), ids=COMMUNICATION)
def test_communication(
    found: tuple[ShardingCandidate, ...], name: str, expected: list[tuple[str, int, int, str]]
) -> None:
    (candidate,) = [each for each in found if each.name == name]
    assert {each.kind for each in candidate.communication} <= {"all_reduce"}
    assert [
        (each.phase, each.mesh_axis, each.payload_bytes, each.operand) for each in candidate.communication
    ] == expected


def test_types_of_operands() -> None:
    (candidate,) = candidates(batch_norm((4, 16, 8, 8)), (1,))
    assert {operand.name: operand.type for operand in candidate.operands} == {
        "input": "arg",
        "weight": "param",
        "bias": "param",
        "running_mean": "buffer",
        "running_var": "buffer",
        "output": "output",
    }


# squares of the values instead of their distances from the mean would lose all digits
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], ids=["single", "half"]
)
def test_values_far_from_zero_keep_their_digits(dtype: torch.dtype, tolerance: float) -> None:
    (candidate,) = candidates(batch_norm((64, 4), affine=False, track_running_stats=False).typed(dtype), (1,))
    drawn = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    values = (drawn * 8 + 1000).to(dtype)
    made = candidate.operation.compute(LocalOperands(tensors={"input": values}))
    wanted = nn.functional.batch_norm(values.double(), None, None, training=True)
    assert isinstance(made, torch.Tensor)
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=tolerance)


def _running_statistics(_rank: int, candidate: ShardingCandidate, steps: int) -> dict[str, torch.Tensor]:
    mesh = mesh_of((4,))
    generator = torch.Generator().manual_seed(0)
    whole = {
        operand.name: torch.randn(operand.shape, generator=generator, dtype=torch.float64)
        for operand in candidate.inputs
    }
    placed = distribute(candidate, mesh, whole)
    for _ in range(steps):
        apply(candidate, mesh, placed)
    return {name: placed[name].to_local() for name in ("running_mean", "running_var")}


def test_every_rank_keeps_running_statistics_of_the_whole_batch(pool4: RankPool) -> None:
    candidate = next(
        each for each in candidates(batch_norm((8, 3)).typed(torch.float64), (4,)) if "batch" in each.choices
    )
    dense = nn.BatchNorm1d(3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    whole = {
        operand.name: torch.randn(operand.shape, generator=generator, dtype=torch.float64)
        for operand in candidate.inputs
    }
    dense.load_state_dict(
        {name: whole[name] for name in ("weight", "bias", "running_mean", "running_var")}, strict=False
    )
    for _ in range(3):
        dense(whole["input"])
    for found in pool4.run(_running_statistics, candidate, 3):
        for name, running in found.items():
            torch.testing.assert_close(running, dense.get_buffer(name), rtol=1e-12, atol=1e-12)


MODULES: dict[str, tuple[tuple[ShardingCandidate, ...], tuple[ShardingCandidate, ...]]] = {
    "nn.LayerNorm": (
        candidates(module_operation(nn.LayerNorm((4, 8), eps=1e-3, bias=False), (4, 4, 8)), (2,)),
        candidates(layer_norm((4, 4, 8), (4, 8), eps=1e-3, bias=False), (2,)),
    ),
    "nn.LayerNorm without parameters": (
        candidates(
            module_operation(nn.LayerNorm(8, elementwise_affine=False), (4, 8)).typed(torch.float64), (2,)
        ),
        candidates(layer_norm((4, 8), (8,), elementwise_affine=False).typed(torch.float64), (2,)),
    ),
    "nn.BatchNorm2d": (
        candidates(module_operation(nn.BatchNorm2d(8, eps=1e-3, momentum=0.3), (4, 8, 3, 3)), (2, 2)),
        candidates(batch_norm((4, 8, 3, 3), eps=1e-3, momentum=0.3), (2, 2)),
    ),
    "nn.BatchNorm1d without anything": (
        candidates(
            module_operation(nn.BatchNorm1d(8, affine=False, track_running_stats=False), (4, 8)), (2,)
        ),
        candidates(batch_norm((4, 8), affine=False, track_running_stats=False), (2,)),
    ),
}


@pytest.mark.parametrize(("found", "expected"), MODULES.values(), ids=MODULES)
def test_a_module_says_it_all(
    found: tuple[ShardingCandidate, ...], expected: tuple[ShardingCandidate, ...]
) -> None:
    require_equal(found, expected)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "other last dimensions": (
        lambda: candidates(layer_norm((4, 16), (8,)), (2,)),
        "normalized_shape: must be how (4, 16) ends, got (8,)",
    ),
    "more dimensions than there are": (
        lambda: candidates(layer_norm((16,), (4, 16)), (2,)),
        "normalized_shape: must be how (16,) ends, got (4, 16)",
    ),
    "an unknown mode": (
        lambda: candidates(layer_norm((4, 16), (16,)), (2,), "all"),  # type: ignore[arg-type]
        "mode: must be classic or complete, got 'all'",
    ),
    "no channels": (
        lambda: candidates(batch_norm((4,)), (2,)),
        "input_shape: must have more than one value for each channel, got (4,)",
    ),
    "a module in evaluation": (
        lambda: candidates(module_operation(nn.BatchNorm1d(4).eval(), (8, 4)), (2,)),
        "module: must be training, got one in evaluation; see elementwise",
    ),
    "a module that averages over all batches": (
        lambda: candidates(module_operation(nn.BatchNorm1d(4, momentum=None), (8, 4)), (2,)),
        "module: must have a momentum, got None",
    ),
    "a module of other channels": (
        lambda: candidates(module_operation(nn.BatchNorm1d(4), (8, 8)), (2,)),
        "input_shape: must have 4 channels, got (8, 8)",
    ),
    "one value a channel": (
        lambda: candidates(batch_norm((1, 4, 1)), (2,)),
        "input_shape: must have more than one value for each channel, got (1, 4, 1)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        call()
    assert str(error.value) == message
