"""Time of `ac=budget` at the measured peak of a peer, from narrow models to wide ones.

Of each width the peers are `full`, `selective_op`, and `selective_layer` of every second block. The plans are
those of each objective, for the peer's own peak. Steps of the plain model, the peer and ours are timed
in turns; times are CPU seconds of one thread, which other programs of a busy machine hardly lengthen.

    OMP_NUM_THREADS=1 python -m bench.peers --part widths [--widths 64 128 256 512] [--turns 24]
        [--objective both time]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
from rich.table import Table

from bench.output import parser, publish
from bench.overhead.steps import process_time_s
from bench.peers.ours import plan_at, step_graph, trained_by
from bench.peers.workload import Workload
from bench.table import table_of
from harness.measure.speed.timing import in_turns
from harness.records.statistics import Ratio, ratio_to_baseline
from harness.trial.steps import train
from strategies.budget.planning.cost import Objective
from strategies.budget.planning.planner import Planner

PEERS: Mapping[str, Sequence[str]] = {
    "full": ("ac=full",),
    "selective_op": ("ac=selective_op",),
    "selective_layer 2": ("ac=selective_layer", "ac.ac_freq=2"),
}
"""Overrides of each peer, by its name."""

_WIDTHS = (64, 128, 256, 512)
OBJECTIVES: Sequence[Objective] = ("both", "time")


@dataclass(frozen=True, kw_only=True, slots=True)
class AtPeak:
    """Ours at the peak of a peer; peaks are shares of the plain step's, costs percent of its FLOPs.

    Fields:
        width, peer, objective: what was compared.
        share, ours_share: peaks.
        extra, ours_extra: FLOPs of what runs again.
        misses_bytes: predicted less measured peak of ours; `None` where no plan keeps the peer's peak.
        reruns: blocks that run again as a whole.
        plain_over_peer, ours_over_peer: ratios of step times.
    """

    width: int
    peer: str
    objective: str
    share: float
    extra: float
    ours_share: float | None = None
    ours_extra: float | None = None
    misses_bytes: int | None = None
    reruns: int | None = None
    plain_over_peer: Ratio | None = None
    ours_over_peer: Ratio | None = None


def main(words: Sequence[str]) -> int:
    """Compare, print the table, write the JSON; return 1 where a plan breaks its budget or its prediction."""
    arguments = parser(__doc__, "widths", command="peers")
    arguments.add_argument("--widths", nargs="+", type=int, default=_WIDTHS)
    arguments.add_argument("--turns", type=int, default=24, help="timed steps of each")
    arguments.add_argument("--objective", nargs="+", choices=get_args(Objective), default=OBJECTIVES)
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    rows = [row for width in chosen.widths for row in rows_of(width, chosen.turns, chosen.objective)]
    publish(
        _table(rows),
        chosen.out,
        protocol={
            "turns": chosen.turns,
            "threads": 1,
            "clock": "process_time",
            "workloads": {width: overrides(width) for width in chosen.widths},
        },
        results=rows,
    )
    return int(any(row.misses_bytes or (row.ours_share or 0.0) > row.share for row in rows))


def overrides(width: int) -> tuple[str, ...]:
    """Return the experiment: four blocks, four samples of half as many tokens as the width, 64 at least."""
    sizes = (
        f"model.width={width}",
        f"model.hidden_width={3 * width}",
        f"sequence_length={max(64, width // 2)}",
    )
    return ("model=llama_nano", *sizes, "batch_size=4", "mesh.device=cpu", "ac=none", "optimizer=sgd")


def rows_of(width: int, turns: int, objectives: Sequence[Objective] = OBJECTIVES) -> Iterator[AtPeak]:
    """Yield the comparisons of one width, with so many timed steps of each."""
    workload = Workload(f"llama {width}", overrides(width))
    plain = workload.trainee()
    measured = workload.measured(plain)
    graph, batch = step_graph(workload), workload.batch(0)
    planners = [Planner(graph, objective=each) for each in objectives]
    for peer, changes in PEERS.items():
        theirs = workload.trainee(workload.experiment(*changes))
        at = workload.measured(theirs)
        rows = [
            AtPeak(
                width=width,
                peer=peer,
                objective=objective,
                share=at.peak_bytes / measured.peak_bytes,
                extra=100 * (at.flops / measured.flops - 1),
            )
            for objective in objectives
        ]
        plans = [plan_at(planner, at.peak_bytes) for planner in planners]
        planned = [None if plan is None else trained_by(plan, workload) for plan in plans]
        steps = [partial(train, each, batch) for each in (plain, theirs, *filter(None, planned))]
        plain_s, peer_s, *times = in_turns(steps, warmup=2, turns=turns, clock=process_time_s)
        for row, plan, trainee in zip(rows, plans, planned, strict=True):
            if plan is None or trainee is None:
                yield row
                continue
            ours = workload.measured(trainee)
            yield replace(
                row,
                ours_share=ours.peak_bytes / measured.peak_bytes,
                ours_extra=100 * (ours.flops / measured.flops - 1),
                misses_bytes=plan.predicted_peak_bytes - ours.peak_bytes,
                reruns=sum(block.rerun for block in plan.blocks),
                plain_over_peer=ratio_to_baseline(plain_s, peer_s),
                ours_over_peer=ratio_to_baseline(times.pop(0), peer_s),
            )


def _table(rows: Sequence[AtPeak]) -> Table:
    return table_of(
        rows,
        {
            "width": "width",
            "peer": "peer",
            "objective": "objective",
            "peak": "share:.3f",
            "extra FLOPs %": "extra:.1f",
            "ours, peak": "ours_share:.3f",
            "ours, FLOPs %": "ours_extra:.1f",
            "misses, bytes": "misses_bytes",
            "reruns": "reruns",
            "plain / peer": "plain_over_peer:3",
            "ours / peer": "ours_over_peer:3",
        },
        caption="times: CPU seconds in turns, median ratio [95 % interval]",
    )
