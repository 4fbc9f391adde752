"""Pipelines in words: how often blocks run, and which are recomputed more often than once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.records.measured import StagesInFlight
from harness.records.record import Record

_BY_PARTS = (
    "torch's checkpoint recomputes for each call of autograd, and a backward in two parts makes one for the "
    "input and one for each group of parameters"
)

_AS_ASKED = ", once for each part of a backward, as ac.split_backward=again says"


def pipeline_notes(record: Record) -> Iterator[str]:
    """Yield how often a block is recomputed for a micro-batch, where that is more than once."""
    work, memory = record.work, record.memory
    if record.status != "ok" or work is None or memory is None or memory.pipeline is None:
        return
    microbatches = record.experiment.get("microbatches", 1)
    times = max(work.calls.values(), default=0) // microbatches - 1
    if times > 1:
        is_asked = record.experiment["ac"].get("split_backward") == "again"
        why = _AS_ASKED if is_asked else f": {_BY_PARTS}" if work.recomputations.get("weight") else ""
        yield f"recomputed {times} times, a block in each micro-batch{why}"


def forwards_of_blocks(stages: StagesInFlight, microbatches: int) -> str:
    """Return forwards for a micro-batch, by forward, input part and weight part: `1 + 1 + 9 (layers.2)`.

    Blocks that run alike stand together; of more than two the first and the last by name.
    """
    alike: dict[str, list[str]] = {}
    for name, counts in stages.forwards.items():
        times = " + ".join(f"{count / microbatches:g}" for count in counts.values())
        alike.setdefault(times, []).append(name)
    return ", ".join(f"{times} ({_listed(names)})" for times, names in alike.items())


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 2:  # noqa: PLR2004 (both ends)
        return ", ".join(names)
    return f"{len(names)} blocks from {names[0]} to {names[-1]}"
