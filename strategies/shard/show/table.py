"""Candidates as a table: name, placements, communication and cost, the cheapest first."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strategies.shard.candidates.redistribution import Phase
from strategies.shard.candidates.sharding_candidate import ShardingCandidate

_LEGEND = (
    "Placements by dimension: S01 is sharded over mesh axes 0 and 1, R is replicated. Collectives by "
    "operand@axis with the payload of each. FLOPs, memory and time are those of one rank in one step."
)
_GAP = 3


def print_candidates(candidates: Sequence[ShardingCandidate]) -> None:
    """Print one line a candidate, as wide as it takes."""
    cheapest = sorted(candidates, key=lambda each: (each.cost.total_s, each.cost.memory_bytes))
    columns = (
        "candidate",
        *(operand.name for operand in candidates[0].operands),
        "forward",
        "backward",
        "kFLOP",
        "memory B",
        "time µs",
    )
    rows = [_row(candidate) for candidate in cheapest]
    table = Table(box=box.SIMPLE_HEAD)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="right" if index >= len(columns) - _GAP else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # plain text: rich reads brackets as markup
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    console = Console(highlight=False)
    console.width = max(console.width, sum(widths) + _GAP * len(widths) + 1)
    console.print(table)
    console.print(f"{len(rows)} candidates. {_LEGEND}", soft_wrap=True)


def _row(candidate: ShardingCandidate) -> tuple[str, ...]:
    cost = candidate.cost
    return (
        candidate.name,
        *(operand.spec for operand in candidate.operands),
        _collectives(candidate, "forward"),
        _collectives(candidate, "backward"),
        f"{(cost.forward_flops + cost.backward_flops) / 1e3:.1f}",
        str(cost.memory_bytes),
        f"{cost.total_s * 1e6:.3f}",
    )


def _collectives(candidate: ShardingCandidate, phase: Phase) -> str:
    """Return `all_reduce output@0 4096 B`; axes over which the same happens stand together."""
    axes: dict[tuple[str, str, int], list[str]] = {}
    for collective in candidate.communication:
        if collective.phase == phase:
            what = collective.kind, collective.operand, collective.payload_bytes
            axes.setdefault(what, []).append(str(collective.mesh_axis))
    words = [
        f"{kind} {operand}@{','.join(over)} {payload} B" for (kind, operand, payload), over in axes.items()
    ]
    return "; ".join(words) or "-"
