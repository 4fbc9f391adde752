"""Limits of a result, in sentences: of the model, a budget, a sharding, a shared example."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.records.measured import AROUND
from harness.records.record import Record
from harness.report.facts.labels import group_name, mesh_sizes
from harness.report.facts.number_words import human_bytes

_SHARDED = re.compile(r"S\d")  # in the name of a candidate, as in `RS0 = RR x RS0`


def plan_notes(record: Record) -> Iterator[str]:
    """Yield what was changed of the model, who computes an example, and what became of plans."""
    yield from questions(record)
    if record.status != "ok":
        return
    yield from replaced(record)
    yield from _example(record)
    plan = record.plan or {}
    yield from _chunks(record, plan.get("chunk") or {})
    if record.memory is not None and group_name(record.experiment, "ac") == "budget":
        yield from _unkept(plan.get("budget_bytes"), record.memory.peak_bytes)
    sharding = plan.get("sharding")
    if sharding is not None and _shards_nothing(sharding):
        yield f"nothing is sharded: {_who(record.experiment)} runs the whole model{_by(record.experiment)}"


def replaced(record: Record) -> Iterator[str]:
    """Yield what stands in for what the user's code decides, measured or predicted."""
    if record.trained is not None and record.trained.replaced:
        yield f"not as the model's own code has it: {'; '.join(record.trained.replaced)}"


def questions(record: Record) -> Iterator[str]:
    """Yield what is asked about the blocks that have regions."""
    if record.trained is not None:
        yield from (each for each in record.trained.remarks if each.startswith(AROUND))


def _example(record: Record) -> Iterator[str]:
    """Yield a sentence where every rank trains on the same example, and repeats the others' work."""
    sizes = [*mesh_sizes(record.experiment), 1, 1]
    ranks = sizes[0] * sizes[1]
    if record.trained is not None and record.trained.inputs == "example" and ranks > 1:
        yield (
            f"each of {ranks} data-parallel ranks computes the whole example; "
            "model.split_example=true shares its rows out"
        )


def _chunks(record: Record, plan: Mapping[str, Any]) -> Iterator[str]:
    chosen = group_name(record.experiment, "chunk")
    if record.memory is None or chosen not in {"budget", "minimum"}:
        return
    if not plan.get("regions") and record.work is not None and not record.work.chunks:
        if chosen == "minimum":  # of a budget that is kept anyway the record has a note
            yield "no chunk makes the activation peak lower"
        return
    ac = group_name(record.experiment, "ac")
    beside = "" if ac in {"none", "?"} else f" with ac={ac}"
    yield from _unkept(plan.get("budget_bytes"), record.memory.activation_peak_bytes, beside)


def _unkept(budget_bytes: object, peak_bytes: int, beside: str = "") -> Iterator[str]:
    if isinstance(budget_bytes, int) and peak_bytes > budget_bytes:
        words = human_bytes(budget_bytes), human_bytes(peak_bytes)
        budget, peak = words if words[0] != words[1] else (f"{budget_bytes:,} B", f"{peak_bytes:,} B")
        yield f"the budget of {budget} is not kept: {peak}{beside}"


def _shards_nothing(sharding: Mapping[str, Any]) -> bool:
    names = sharding.get("candidates", {}).values()
    return sharding.get("communicated_bytes") == 0 and not any(_SHARDED.search(name) for name in names)


def _who(experiment: Mapping[str, Any]) -> str:
    """Return which ranks are meant: FSDP may shard parameters over others."""
    mesh = experiment.get("mesh")
    is_only_axis = isinstance(mesh, Mapping) and mesh.get("dp_shard", 1) == 1
    return "every rank" if is_only_axis else "every tensor-parallel rank"


def _by(experiment: Mapping[str, Any]) -> str:
    shard = experiment.get("shard")
    if not isinstance(shard, Mapping) or shard.get("name") != "cheapest":
        return ""
    return (
        f"; cheapest at flops_per_s={shard.get('flops_per_s'):g} "
        f"bandwidth_bytes_per_s={shard.get('bandwidth_bytes_per_s'):g} latency_s={shard.get('latency_s'):g}"
    )
