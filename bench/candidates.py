"""Sharding candidates of a linear on four ranks, 2 x 2: how many there are, and whether they are right.

The names of mode `classic` are those of ColossalAI's test of its linear handler. Of mode `complete`, every
candidate is run and compared with the dense linear in float64 (output, all gradients, to 1e-12), and its
collectives are counted and compared with those it promises, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.collectives import Collectives, promised
from bench.table import table_of
from harness.ranks.agent import Agent
from harness.ranks.entry import RankContext
from harness.ranks.start import RankJob
from strategies.shard import linear
from strategies.shard.candidates.layout import Shape
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.candidates.verification import verify

MESH = (2, 2)
OUT_FEATURES = 32
SHAPES: tuple[Shape, ...] = ((8, 16), (4, 4, 16), (4, 4, 4, 16))
LIMIT_S = 60.0
"""For all candidates of the largest shape."""
KNOWN_NAMES = frozenset(
    {f"S{a}S{b} = S{a}R x RS{b}_{i}" for a, b in ((0, 1), (1, 0)) for i in range(3)}
    | {f"S{a}R = S{a}S{b} x S{b}R_{i}" for a, b in ((0, 1), (1, 0)) for i in range(3)}
    | {f"RS{a} = RS{b} x S{b}S{a}" for a, b in ((0, 1), (1, 0))}
    | {name for a in range(2) for name in (f"RR = RS{a} x S{a}R", f"RS{a} = RR x RS{a}")}
    | {f"S01R = S01R x RR_{i}" for i in range(3)}
    | {"RR = RS01 x S01R", "RS01 = RR x RS01", "RR = RR x RR"}
)
_DEADLINE_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumerated:
    """One shape.

    Fields:
        input_shape: shape of the linear's input.
        classic, complete: number of candidates.
        expected: number of complete ones, (b + 3)^2.
        is_the_seeds: whether the classic names are ColossalAI's; `None` for shapes that it does not test.
        verified: complete candidates that equal the dense linear on every rank.
        kept: those whose collectives are the promised ones on every rank.
        seconds: time to verify all of them, on the slowest rank.
    """

    input_shape: Shape
    classic: int
    complete: int
    expected: int
    is_the_seeds: bool | None
    verified: int
    kept: int
    seconds: float

    @property
    def problem(self) -> str | None:
        """Say what keeps the row from counting; `None` where nothing does."""
        if self.is_the_seeds is False:
            return "other names than ColossalAI's"
        if not self.complete == self.expected == self.verified == self.kept:
            return f"{self.expected} expected"
        if self.seconds > LIMIT_S:
            return f"more than {LIMIT_S:g} s"
        return None


def enumerated(agent: Agent, trial_dir: Path) -> list[Enumerated]:
    """Run every candidate of all shapes in one set of ranks.

    Raises:
        RuntimeError: the ranks did not come to an end.
    """
    job = RankJob(
        trial_dir=trial_dir, entry="bench.candidates:run", payload=SHAPES, ranks=4, deadline_s=_DEADLINE_S
    )
    outcome = agent.run(job)
    if outcome.error is not None:
        raise RuntimeError(f"candidates: {outcome.error.message}")
    return [
        _enumerated(shape, [result["shapes"][at] for result in outcome.results])
        for at, shape in enumerate(SHAPES)
    ]


def run(shapes: Sequence[Shape], _context: RankContext) -> dict[str, Any]:
    """Verify the candidates of all shapes on this rank; the entry of its process."""
    mesh = init_device_mesh("cpu", MESH)
    return {"shapes": [_shape(shape, mesh) for shape in shapes]}


def table(rows: Sequence[Enumerated]) -> Table:
    """Return the table of all shapes."""
    return table_of(
        rows,
        {
            "input": lambda row: "(" + ", ".join(map(str, row.input_shape)) + ")",
            "classic": lambda row: f"{row.classic}{' (as in ColossalAI)' if row.is_the_seeds else ''}",
            "complete": lambda row: f"{row.complete} of {row.expected}",
            "equal to dense": "verified",
            "collectives as promised": "kept",
            "s": "seconds:.1f",
        },
        title="Candidates of a linear with bias on 2 x 2 ranks",
    )


def _enumerated(shape: Shape, ranks: Sequence[dict[str, Any]]) -> Enumerated:
    classic = {each.name for each in linear.candidates(shape, OUT_FEATURES, MESH)}
    complete = [each.name for each in _complete(shape)]
    return Enumerated(
        input_shape=shape,
        classic=len(classic),
        complete=len(set(complete)),
        expected=(len(shape) + 2) ** 2,
        is_the_seeds=classic == KNOWN_NAMES if shape == SHAPES[-1] else None,
        verified=sum(all(name in rank["verified"] for rank in ranks) for name in complete),
        kept=sum(all(name in rank["kept"] for rank in ranks) for name in complete),
        seconds=max(rank["seconds"] for rank in ranks),
    )


def _complete(shape: Shape) -> tuple[ShardingCandidate, ...]:
    return linear.candidates(shape, OUT_FEATURES, MESH, "complete", dtype=torch.float64)


def _shape(shape: Shape, mesh: DeviceMesh) -> dict[str, Any]:
    verified, kept = [], []
    start_s = perf_counter()
    for candidate in _complete(shape):
        with Collectives() as counter:
            differences = verify(candidate, mesh)
        verified += [] if differences else [candidate.name]
        kept += [candidate.name] if counter.counts == promised(candidate.communication) else []
    return {"verified": verified, "kept": kept, "seconds": perf_counter() - start_s}
