"""Pipelines in sentences: what each rank holds, and blocks that are recomputed more often than once."""

from __future__ import annotations

from collections.abc import Iterator

from harness.records.record import Record
from harness.report.facts.number_words import human_bytes

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


def stages_by_rank(record: Record) -> Iterator[tuple[str, str]]:
    """Yield each rank of a pipeline with its stages, what it holds of them at most, and its peak."""
    memory = record.memory
    for each in (memory.pipeline or ()) if memory is not None else ():
        stages = " and ".join(map(str, each.stages))
        held = f"{each.in_flight} forwards in flight"
        if each.in_flight_weights != each.in_flight:
            held += f", {each.in_flight_weights} until the gradients of weights"
        left = f"{human_bytes(each.bytes_a_microbatch)} a forward, peak {human_bytes(each.peak_bytes)}"
        noun = "stage" if len(each.stages) == 1 else "stages"
        yield f"rank {each.rank}", f"{noun} {stages}: at most {held}, {left}"
