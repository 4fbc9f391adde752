"""Sharding: the candidates of a linear, and the variants on the tensor-parallel axis.

First every candidate of a linear on four ranks is compared with the dense one (`bench.candidates`). Then for
each model and mesh the plans are run and proven against the model as the mesh alone shards it, without AC and
with it. A row counts when the verdict is `neutral`, the step communicates what the plan promises, kind by
kind (with FSDP on the mesh those kinds that FSDP does not use; AC repeats those of its forward), and
`cheapest` is no dearer than `megatron`, in modelled seconds, promised bytes and measured bytes, FSDP's too.

    python -m bench.sharding --models gpt_nano --meshes tp2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Group
from rich.table import Table

from bench.candidates import enumerated, table
from bench.output import parser, publish
from bench.table import Column, table_of
from bench.trials import PRELOAD, experiments, records
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.record import Record

MODELS = ("gpt_nano", "llama_nano")
MESHES = ("tp2", "shard2_tp2")
SHARDINGS: Mapping[str, tuple[str, ...]] = {
    "none": ("shard=none",),
    "megatron": ("shard=megatron",),
    "candidate": ("shard=candidate",),
    "cheapest": ("shard=cheapest",),
    "cheapest, little memory": ("shard=cheapest", "shard.memory_limit_mib={limit_mib}"),
}
ACS: Mapping[str, tuple[str, ...]] = {
    "none": tuple(SHARDINGS),
    "full": ("none", "megatron", "cheapest"),
    "selective_op": ("none", "megatron", "cheapest"),
}
"""Which shardings are run with each AC variant."""
PROTOCOL = ("protocol=parity", "data=synthetic")

_LIMIT_MIB = {"gpt_nano": {"tp2": 32, "shard2_tp2": 16}, "llama_nano": {"tp2": 40, "shard2_tp2": 20}}
"""Into which no replicated model fits."""
_MIB = 1 << 20
_PHASES = ("forward", "backward")
_FSDP_KINDS = frozenset({"all_gather", "reduce_scatter"})
"""What FSDP communicates by, beside the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedTrial:
    """One row.

    Fields:
        model, mesh, sharding, ac: what was run.
        verdict: verdict of the trial.
        seconds: modelled time of a rank and step; `None` without a plan.
        memory_bytes: modelled memory of a rank; `None` without a plan.
        promised_bytes: payload of the plan's collectives; `None` without a plan.
        measured_bytes: payload of all collectives of the measured step, FSDP's included.
        problem: what keeps the row from counting; `None` where nothing does.
    """

    model: str
    mesh: str
    sharding: str
    ac: str
    verdict: str
    seconds: float | None
    memory_bytes: int | None
    promised_bytes: int | None
    measured_bytes: int
    problem: str | None


def main() -> int:
    """Run all rows, print the table, write the JSON; return 1 if a row does not count."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        candidates = enumerated(agent, Path(folder, "candidates"))
        findings = [
            finding
            for model, mesh in product(arguments.models, arguments.meshes)
            for finding in _findings(agent, model, mesh, Path(folder, f"{model}-{mesh}"))
        ]
    publish(
        Group(table(candidates), _table(findings)),
        arguments.out,
        protocol={
            "overrides": PROTOCOL,
            "shardings": SHARDINGS,
            "acs": ACS,
            "memory_limits_mib": _LIMIT_MIB,
        },
        results={
            "candidates": [asdict(row) for row in candidates],
            "trials": [asdict(finding) for finding in findings],
        },
    )
    wrong = [row for row in candidates if row.problem is not None]
    for row in wrong:
        print(f"linear of {row.input_shape}: {row.problem}")
    problems = [finding for finding in findings if finding.problem is not None]
    for finding in problems:
        print(f"{finding.sharding}, AC {finding.ac}, on {finding.mesh}, {finding.model}: {finding.problem}")
    print(f"neutral, and as promised: {len(findings) - len(problems)} of {len(findings)}")
    return int(bool(problems or wrong))


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "sharding")
    made.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    made.add_argument("--meshes", nargs="+", choices=MESHES, default=MESHES)
    return made.parse_args()


def _findings(agent: Agent, model: str, mesh: str, trial_dir: Path) -> list[ShardedTrial]:
    rows = [(sharding, ac) for ac, shardings in ACS.items() for sharding in shardings]
    overrides = [
        [
            f"model={model}",
            f"mesh={mesh}",
            "mesh.device=cpu",
            f"ac={ac}",
            *(each.format(limit_mib=_LIMIT_MIB[model][mesh]) for each in SHARDINGS[sharding]),
            *PROTOCOL,
        ]
        for sharding, ac in rows
    ]
    found = dict(zip(rows, records(agent, experiments(overrides), trial_dir), strict=True))
    return [
        _finding(model, mesh, row, record, found["megatron", row[1]] if row[0] == "cheapest" else None)
        for row, record in found.items()
    ]


def _finding(
    model: str, mesh: str, row: tuple[str, str], record: Record, megatron: Record | None
) -> ShardedTrial:
    plan = (record.plan or {}).get("sharding")
    sharding, ac = row
    return ShardedTrial(
        model=model,
        mesh=mesh,
        sharding=sharding,
        ac=ac,
        verdict=record.verdict,
        seconds=plan and plan["seconds"],
        memory_bytes=plan and plan["memory_bytes"],
        promised_bytes=plan and plan["communicated_bytes"],
        measured_bytes=sum(_measured(record).values()),
        problem=problem(record, megatron, is_sharded=mesh != "tp2", is_recomputed=ac != "none"),
    )


def problem(record: Record, megatron: Record | None, *, is_sharded: bool, is_recomputed: bool) -> str | None:
    """Say what keeps a row from counting; `None` when nothing does.

    Args:
        record: of the row.
        megatron: what it must not be dearer than, where there is such a thing.
        is_sharded: whether FSDP runs collectives of its own beside those of the plan.
        is_recomputed: whether AC repeats those of the plan's forward.
    """
    if record.error is not None:
        return f"{record.status}: {record.error.message}"
    if record.verdict != "neutral":
        return record.verdict
    ignored = _FSDP_KINDS if is_sharded else frozenset()
    promised, measured = (
        {key: count for key, count in found.items() if key[1] not in ignored}
        for found in (_promised(record), _measured(record))
    )
    if record.plan is not None and promised != measured and not is_recomputed:
        return f"promised {promised}, measured {measured}"
    if megatron is not None:
        return _dearer(record, megatron)
    return None


def _dearer(record: Record, megatron: Record) -> str | None:
    assert record.plan is not None
    assert megatron.plan is not None
    ours, theirs = record.plan["sharding"], megatron.plan["sharding"]
    sizes = {
        "modelled seconds": (ours["seconds"], theirs["seconds"]),
        "promised bytes": (ours["communicated_bytes"], theirs["communicated_bytes"]),
        "measured bytes": (sum(_measured(record).values()), sum(_measured(megatron).values())),
    }
    more = [f"{name}: {one} > {other}" for name, (one, other) in sizes.items() if one > other]
    return f"dearer than megatron in {'; '.join(more)}" if more else None


def _measured(record: Record) -> Counter[tuple[str, str]]:
    """Return the bytes of the measured step by phase and kind."""
    by_phase = {} if record.work is None else record.work.collective_bytes
    return Counter(
        {(phase, kind): count for phase in _PHASES for kind, count in by_phase.get(phase, {}).items()}
    )


def _promised(record: Record) -> Counter[tuple[str, str]]:
    """Return the bytes of the plan by phase and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for each in (record.plan or {}).get("sharding", {}).get("collectives", []):
        found[each["phase"], each["kind"]] += each["payload_bytes"] * each["count"]
    return found


def _table(findings: Sequence[ShardedTrial]) -> Table:
    return table_of(
        findings,
        {
            "model": "model",
            "mesh": "mesh",
            "sharding": "sharding",
            "AC": "ac",
            "verdict": "verdict",
            "modelled µs": _scaled("seconds", 1e6),
            "modelled memory MiB": _scaled("memory_bytes", 1 / _MIB),
            "promised MiB": _scaled("promised_bytes", 1 / _MIB),
            "measured MiB": _scaled("measured_bytes", 1 / _MIB),
        },
        title="Sharding over two tensor-parallel ranks, a rank and step",
    )


def _scaled(name: str, scale: float) -> Column:
    def text(row: ShardedTrial) -> str:
        value: float | None = getattr(row, name)
        return "-" if value is None else f"{value * scale:.2f}"

    return text


if __name__ == "__main__":
    sys.exit(main())
