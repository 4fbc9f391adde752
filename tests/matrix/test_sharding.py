"""The sharding variants on the tensor-parallel axis: neutral, as promised, and `cheapest` is the cheapest.

A row counts when its verdict is `neutral`, when the step communicates what the plan promises, kind by kind
(with FSDP on the mesh those kinds that FSDP does not use; AC repeats those of its forward), and when
`cheapest` is no dearer than `megatron`, in modelled seconds, promised bytes and measured bytes, FSDP's too.
Candidates of single operators are proven in `tests/strategies/shard`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from bench.trials import experiments
from harness.records.record import Record
from tests.matrix.facts import Run

SHARDINGS: Mapping[str, str] = {
    "none": "shard=none",
    "megatron": "shard=megatron",
    "candidate": "shard=candidate",
    "cheapest": "shard=cheapest",
    "cheapest, little memory": "shard=cheapest shard.memory_limit_mib={limit_mib}",
}
ACS: Mapping[str, tuple[str, ...]] = {
    "none": tuple(SHARDINGS),
    "full": ("none", "megatron", "cheapest"),
    "selective_op": ("none", "megatron", "cheapest"),
}
"""Which shardings are run with each AC variant."""
_LIMIT_MIB = {
    ("gpt_nano", "tp2"): 32,
    ("gpt_nano", "shard2_tp2"): 16,
    ("llama_nano", "tp2"): 40,
    ("llama_nano", "shard2_tp2"): 20,
}
"""Into which no replicated model fits."""
_PHASES = ("forward", "backward")
_FSDP_KINDS = frozenset({"all_gather", "reduce_scatter"})
"""What FSDP communicates by, beside the plan."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), _LIMIT_MIB)
def test_a_step_is_neutral_and_communicates_what_its_plan_promises(run: Run, model: str, mesh: str) -> None:
    limit_mib = _LIMIT_MIB[model, mesh]
    rows = [(sharding, ac) for ac, shardings in ACS.items() for sharding in shardings]
    common = f"model={model} mesh={mesh} mesh.device=cpu protocol=parity data=synthetic"
    overrides = [
        f"{common} ac={ac} {SHARDINGS[sharding]}".format(limit_mib=limit_mib) for sharding, ac in rows
    ]
    found = dict(zip(rows, run(experiments(each.split() for each in overrides)), strict=True))
    problems = {
        row: problem(
            record,
            found["megatron", row[1]] if row[0] == "cheapest" else None,
            is_sharded=mesh != "tp2",
            is_recomputed=row[1] != "none",
        )
        for row, record in found.items()
    }
    assert {row: said for row, said in problems.items() if said is not None} == {}


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
    return None if megatron is None else _dearer(record, megatron)


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
