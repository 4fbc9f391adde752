"""Peers of `ac=budget` through their own libraries: same model, same meters, one run.

Each peer runs at its own settings. At the peak that it reaches, measured, `ac=budget` plans and runs; so does
the bound. FLOPs and bytes are those of the meters; steps are timed in turns. Of compiled peers no time is
compared: `aot_eager` runs the operators of their graphs one by one, so that the meters see them. Peers from
other packages are rows without numbers where these are missing:

    pip install --no-deps --target FOLDER torchtitan tyro docstring_parser typeguard spmd-types
    pip install --no-deps --target FOLDER pulp pwlf ckptplan
    PYTHONPATH=FOLDER python -m bench.peers [--workloads gpt llama llama_softmax vit] [--only rotor]

`--workloads` also takes networks that nothing was tuned on: `convnext2 fnet griffin poolformer regnet`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from rich.console import Group
from rich.table import Table

from bench.output import parser, publish
from bench.peers import blockwise, libraries, rotor, sac
from bench.peers.compared import Compared, Comparison
from bench.peers.ours import Ablation
from bench.peers.workload import KNOWN, WORKLOADS, Peer, Workload
from bench.table import table_of

SHARES = tuple(share / 100 for share in range(20, 101, 5))
"""Budgets of ablations and of the figure's lines."""

BRIEF = ("share", "extra", "ours", "difference", "executor")
"""Fields of `Compared` that `--brief` keeps, in this order."""

VERDICTS = ("ahead", "equal", "behind", "no plan", "not run")


def main(words: Sequence[str]) -> int:
    """Compare, print the tables, write the JSON; return 1 where a plan breaks its budget."""
    arguments = parser(__doc__, "peers")
    arguments.add_argument("--workloads", nargs="+", choices=[*KNOWN], default=[*WORKLOADS])
    arguments.add_argument("--only", default="", help="peers whose name has this")
    arguments.add_argument("--turns", type=int, default=6, help="timed steps of each; 0: none")
    arguments.add_argument("--brief", action="store_true", help="leave ablations out, and write few numbers")
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    rows: list[Compared] = []
    ablations: list[Ablation] = []
    for name in chosen.workloads:
        workload = KNOWN[name]
        with workload.kernels():
            comparison = Comparison(workload, chosen.turns)
            for peer in peers(workload):
                if chosen.only in peer.name:
                    rows.append(comparison.of(peer))
                    print(rows[-1], file=sys.stderr, flush=True)
            if not chosen.brief:
                ablations += [comparison.ours.ablation(share) for share in SHARES]
    names = dict.fromkeys(row.workload for row in rows)
    in_full = [asdict(row) | {"verdict": row.verdict} for row in rows]
    publish(
        Group(
            _table(rows),
            *([_ablation_table(ablations)] if ablations else []),
            *(summary([row for row in rows if row.workload == name]) for name in names),
        ),
        chosen.out,
        protocol={
            "workloads": {name: KNOWN[name].overrides for name in chosen.workloads},
            "turns": chosen.turns,
            "threads": 1,
            "packages": libraries.versions(),
            **({"fields": BRIEF} if chosen.brief else {}),
        },
        results=brief(rows) if chosen.brief else {"peers": in_full, "ablations": ablations},
    )
    return int(any(row.ours_bytes is not None and row.ours_bytes > (row.peak_bytes or 0) for row in rows))


def peers(workload: Workload) -> Iterator[Peer]:
    """Yield all peers of a workload."""
    sizes = rotor.sizes_of_blocks(workload)
    yield from blockwise.peers(len(sizes))
    yield from rotor.peers(sizes)
    yield from libraries.peers()
    yield from sac.peers()
    yield from libraries.of_compiler()


def brief(rows: Sequence[Compared]) -> dict[str, dict[str, list[object]]]:
    """Return `BRIEF` of each setting of each peer that ran, rounded, by workload."""
    found: dict[str, dict[str, list[object]]] = {}
    for row in rows:
        numbers = (getattr(row, name) for name in BRIEF)
        found.setdefault(row.workload, {})[f"{row.peer}, {row.setting}"] = [
            round(each, 4) if isinstance(each, float) else each for each in numbers
        ]
    return found


def summary(rows: Sequence[Compared]) -> str:
    """Return how often ours is ahead, equal or behind, and the worst gap, of one workload."""
    counts = Counter(row.verdict for row in rows)
    words = ", ".join(f"{counts[word]} {word}" for word in VERDICTS)
    compared = [row for row in rows if row.points is not None]
    if not compared:
        return f"{rows[0].workload}: {words}"
    worst = min(compared, key=lambda row: row.points or 0.0)
    against = f"{worst.peer} {worst.setting}".rstrip()
    return (
        f"{rows[0].workload}: {words}; least gain over {against}: {worst.points:+.2f} points at a peak of "
        f"{worst.share:.3f} of the plain one"
    )


def _table(rows: Sequence[Compared]) -> Table:
    return table_of(
        rows,
        {
            "workload": "workload",
            "peer": "peer",
            "setting": "setting",
            "peak": "share:.4f",
            "extra FLOPs %": "extra:.2f",
            "ours": "ours:.2f",
            "bound": "bound:.2f",
            "points": "points:+.2f",
            "": lambda row: row.reason or row.verdict,
            "executor": "executor",
            "time": "time:2",
            "ours / peer": "ours_over_peer:2",
        },
        caption="peak: of the plain step; ours: ac=budget at the peer's peak; times: [95 % interval]",
    )


def _ablation_table(rows: Sequence[Ablation]) -> Table:
    columns = {
        "workload": "workload",
        "budget": "share:.2f",
        **{name.replace("_", " "): f"{name}:.2f" for name in ("bound", "exact", "greedy", "uniform")},
        "whole blocks": "whole_blocks:.2f",
    }
    return table_of(rows, columns, title="extra FLOPs %, with less to choose from")
