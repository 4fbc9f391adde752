"""Redistribution: which steps, what they move, and that tensor and gradient arrive."""

from __future__ import annotations

from itertools import product

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies import StrategyError
from strategies.shard.candidates.layout import Placements
from strategies.shard.candidates.redistribution import (
    Collective,
    LayoutStep,
    collectives,
    reversed_steps,
    steps_between,
)
from tests.rank_pool import RankPool
from tests.strategies.shard.shard_ranks import moves

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
SHAPE = (8, 16)  # 512 bytes in float32
PLANS: dict[str, tuple[Placements, Placements, list[tuple[int, str | None, int]]]] = {
    "where it is": ((S0, R), (S0, R), []),
    "a partial stays partial": ((P, R), (P, R), []),
    "all-reduce": ((P, R), (R, R), [(0, "all_reduce", 512)]),
    "all-reduce of a shard": ((P, S1), (R, S1), [(0, "all_reduce", 256)]),
    "reduce-scatter": ((R, P), (R, S1), [(1, "reduce_scatter", 512)]),
    "all-gather": ((S0, R), (R, R), [(0, "all_gather", 512)]),
    "a slice": ((R, R), (R, S0), [(1, None, 512)]),
    "all-to-all": ((S0, R), (S1, R), [(0, "all_to_all", 256)]),
    "two partial axes": ((P, P), (R, R), [(0, "all_reduce", 512), (1, "all_reduce", 512)]),
    "slices come before what then moves less": ((P, R), (R, S0), [(1, None, 512), (0, "all_reduce", 256)]),
    "inner before outer": (
        (S0, S0),
        (R, R),
        [(1, "all_gather", 256), (0, "all_gather", 512)],
    ),
    "the inner shard makes way": (
        (S0, S0),
        (R, S0),
        [(1, "all_gather", 256), (0, "all_gather", 512), (1, None, 512)],
    ),
    "axes of one dimension change places": (
        (S0, S1),
        (S1, S0),
        [(0, "all_gather", 256), (1, "all_to_all", 256), (0, None, 256)],
    ),
    "reduce before the inner shard": (
        (P, R),
        (S0, S0),
        [(0, "reduce_scatter", 512), (1, None, 256)],
    ),
}


@pytest.mark.parametrize(("source", "target", "steps"), PLANS.values(), ids=PLANS)
def test_plans(source: Placements, target: Placements, steps: list[tuple[int, str | None, int]]) -> None:
    found = steps_between(source, target, shape=SHAPE, mesh_shape=(2, 2), itemsize=4)
    assert [(step.axis, step.kind, step.payload_bytes) for step in found] == steps


def test_axes_of_one_rank_need_no_step() -> None:
    assert steps_between((P, S0), (R, R), shape=SHAPE, mesh_shape=(1, 1), itemsize=4) == ()


def test_the_way_back_undoes_every_step_but_an_all_reduce() -> None:
    steps = (
        _step(P, R),
        _step(P, S0),
        _step(S0, S1),
        _step(S1, R),
        _step(R, S0),
    )
    assert reversed_steps(steps) == (_step(S0, R), _step(R, S1), _step(S1, S0), _step(S0, R))


def _step(source: object, target: object) -> LayoutStep:
    return LayoutStep(axis=0, ranks=2, source=source, target=target, payload_bytes=8)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Placements, Placements, str]] = {
    "a partial target": (
        (R, R),
        (P, R),
        "placements: Replicate() cannot become Partial(sum); reduce to Replicate or Shard",
    ),
    "an uneven target": (
        (R, R),
        (S0, S0),
        "placements: dimension 0 of (6, 16) cannot be cut into 4 even shards",
    ),
}


@pytest.mark.parametrize(("source", "target", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(source: Placements, target: Placements, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        steps_between(source, target, shape=(6, 16), mesh_shape=(2, 2), itemsize=4)
    assert str(error.value) == message


RING: dict[str, tuple[str, float]] = {
    "all-reduce": ("all_reduce", 2 * 3 / 4 * 512),
    "reduce-scatter": ("reduce_scatter", 3 / 4 * 512),
    "all-gather": ("all_gather", 3 / 4 * 512),
    "all-to-all": ("all_to_all", 3 / 4 * 512),
}


@pytest.mark.parametrize(("kind", "link_bytes"), RING.values(), ids=RING)
def test_bytes_on_a_link(kind: str, link_bytes: float) -> None:
    assert _collective("forward", kind, 512, ranks=4).link_bytes == link_bytes


# megatron's pair: column-parallel output against what the row-parallel linear wants, and what others want
RESHARDING: dict[str, tuple[Placements, Placements, list[tuple[str, str, int]]]] = {
    "the same": ((R, S1), (R, S1), []),
    "gathered": ((R, S1), (R, R), [("forward", "all_gather", 512)]),
    "sliced": ((R, R), (R, S1), [("backward", "all_gather", 512)]),
    "turned": ((R, S1), (R, S0), [("forward", "all_to_all", 256), ("backward", "all_to_all", 256)]),
}


@pytest.mark.parametrize(("source", "target", "expected"), RESHARDING.values(), ids=RESHARDING)
def test_resharding_between_neighbours(
    source: Placements, target: Placements, expected: list[tuple[str, str, int]]
) -> None:
    steps = steps_between(source, target, shape=SHAPE, mesh_shape=(2, 2), itemsize=4)
    found = (
        *collectives(steps, phase="forward", operand="input"),
        *collectives(reversed_steps(steps), phase="backward", operand="input"),
    )
    assert found == tuple(_collective(phase, kind, payload) for phase, kind, payload in expected)


def _collective(phase: str, kind: str, payload_bytes: int, ranks: int = 2) -> Collective:
    return Collective(
        phase=phase,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        mesh_axis=1,
        ranks=ranks,
        payload_bytes=payload_bytes,
        operand="input",
    )


@pytest.mark.parametrize(
    "mesh_shape",
    [pytest.param((2, 2), id="2 x 2"), pytest.param((4,), id="4"), pytest.param((1, 2, 2), id="1 x 2 x 2")],
)
def test_every_redistribution_arrives_with_what_it_promises(
    pool4: RankPool, mesh_shape: tuple[int, ...]
) -> None:
    sources = list(product((R, P, S0, S1), repeat=len(mesh_shape)))
    targets = list(product((R, S0, S1), repeat=len(mesh_shape)))
    cases = [(source, target) for source in sources for target in targets]
    if len(mesh_shape) > 2:
        cases = cases[::13]
    for found in pool4.run(moves, cases, (8, 16), mesh_shape):
        for (source, target), (arrives, returns, promised, done) in zip(cases, found, strict=True):
            assert (arrives, returns) == (True, True), f"{source} to {target}"
            assert done == promised, f"{source} to {target}"
