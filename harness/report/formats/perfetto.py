"""A step as a trace that ui.perfetto.dev and chrome://tracing open: bytes over operators, phases and modules.

Source: Trace Event Format (Google, 2016): complete events `X`, counters `C`, metadata `M`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from harness.records.measured import PEAK_PARTS
from harness.records.step_trace import StepTrace, TracedOperator

_Event = dict[str, Any]
_TRACKS = ("phases", "modules", "operators")
CLOCK = "one operator is one microsecond: the axis is the order of operators, not time"


def to_perfetto(traces: Sequence[StepTrace], title: str) -> str:
    """Return the JSON of a trial's step; each rank is a process of the trace."""
    events = [event for trace in traces for event in _events(trace, title)]
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"clock": CLOCK}},
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _events(trace: StepTrace, title: str) -> Iterator[_Event]:
    yield _named(trace.rank, "process_name", f"rank {trace.rank}: {title}")
    for track, name in enumerate(_TRACKS):
        yield _named(trace.rank, "thread_name", name, track) | {"tid": track}
    yield from (event | {"pid": trace.rank, "cat": "step"} for event in _slices(trace.operators))
    yield from (event | {"pid": trace.rank, "cat": "bytes"} for event in _counters(trace))


def _named(rank: int, what: str, name: str, track: int = 0) -> _Event:
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": {"name": name}}


def _slices(operators: Sequence[TracedOperator]) -> Iterator[_Event]:
    """Yield the slices of all tracks; those of a module enclose those of the modules that it calls."""
    numbered = list(enumerate(operators))
    for phase, stay in groupby(numbered, key=lambda each: each[1].phase):
        yield _slice("phases", phase, list(stay))
    yield from _modules(numbered, 1)
    for number, each in numbered:
        told = {"module": each.module, "source": each.source, "node": each.node, "FLOPs": each.flops}
        what = {"recomputed": True} if each.is_recomputed else {}
        args = {key: value for key, value in told.items() if value} | what
        yield _slice("operators", each.name, [(number, each)]) | {"args": args}


def _modules(stay: list[tuple[int, TracedOperator]], depth: int) -> Iterator[_Event]:
    """Yield a slice for each stay in a module at `depth` of the tree, then those within it."""

    def place(each: tuple[int, TracedOperator]) -> tuple[str, ...]:
        return (each[1].phase, *each[1].module.split(".")[:depth])

    for (_, *path), some in groupby(stay, key=place):
        if len(path) == depth:
            within = list(some)
            yield _slice("modules", ".".join(path), within)
            yield from _modules(within, depth + 1)


def _slice(track: str, name: str, stay: Sequence[tuple[int, TracedOperator]]) -> _Event:
    first = stay[0][0]
    return {
        "ph": "X",
        "tid": _TRACKS.index(track),
        "name": name,
        "ts": first,
        "dur": stay[-1][0] + 1 - first,
    }


def _counters(trace: StepTrace) -> Iterator[_Event]:
    parts: Counter[str] = Counter()
    totals: Counter[bool] = Counter()
    for number, nbytes in trace.start:
        storage = trace.storages[number]
        totals[storage.on_host] += nbytes
        parts[storage.part] += 0 if storage.on_host else nbytes
    known = [part for part in PEAK_PARTS if any(each.part == part for each in trace.storages)]

    def told(at: float, *, on_host: bool) -> _Event:
        name = "host bytes" if on_host else "device bytes"
        return {"ph": "C", "name": name, "ts": at, "args": {"bytes": totals[on_host]}}

    def told_part(at: float, part: str) -> _Event:
        return {"ph": "C", "name": f"device bytes: {part}", "ts": at, "args": {"bytes": parts[part]}}

    yield told(0, on_host=False)
    yield from (told_part(0, part) for part in known)
    for change in trace.changes:
        storage = trace.storages[change.storage]
        totals[storage.on_host] += change.delta
        at = max(change.operators - 0.5, 0)  # within the operator that had begun last
        yield told(at, on_host=storage.on_host)
        if not storage.on_host:
            parts[storage.part] += change.delta
            yield told_part(at, storage.part)
