"""Traces keep the schema of Perfetto's JSON importer, and the bytes of the step."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from harness.measure.step import instrument
from harness.measure.step_trace import traced
from harness.report.formats.perfetto import to_perfetto
from tests.harness.measure.metered import tokens, transformer
from tests.harness.step_fixture import STEP

_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": _NUMBER, "dur": _NUMBER, "pid": int, "tid": int},
    "C": {"name": str, "cat": str, "ts": _NUMBER, "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
"""Fields of each kind of event that Perfetto needs (its trace_processor, json_trace_parser)."""


def events(*traces: Any) -> list[dict[str, Any]]:
    value = json.loads(to_perfetto(traces, "full on single"))
    assert set(value) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert value["displayTimeUnit"] in {"ms", "ns"}
    found: list[dict[str, Any]] = value["traceEvents"]
    return found


def require_schema(found: list[dict[str, Any]]) -> None:
    """Check each event: its fields and types, counters of numbers, slices of a track within one another."""
    for event in found:
        kinds = _FIELDS[event["ph"]]
        assert all(isinstance(event[name], kind) for name, kind in kinds.items()), event
        assert set(event) - {"ph", "args"} <= set(kinds), event
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert set(event["args"]) == {"name"}
    tracks = {(event["pid"], event["tid"]) for event in found if event["ph"] == "X"}
    for track in tracks:
        slices = [
            (event["ts"], event["ts"] + event["dur"])
            for event in found
            if event["ph"] == "X" and (event["pid"], event["tid"]) == track
        ]
        for (begin, end), (other, other_end) in combinations(slices, 2):
            is_apart = end <= other or other_end <= begin
            assert is_apart or begin <= other <= other_end <= end or other <= begin <= end <= other_end


@pytest.mark.parametrize("region", ["none", "full"])
def test_a_step_keeps_the_schema_and_has_the_peak_of_the_record(region: str) -> None:
    report = instrument(transformer(region), tokens())
    trace = traced(report, rank=0)
    found = events(trace)
    require_schema(found)
    bytes_at = [event["args"]["bytes"] for event in found if event["name"] == "device bytes"]
    assert max(bytes_at) == report.memory.peak_bytes
    assert [event["name"] for event in found if event.get("tid") == 2 and event["ph"] == "X"] == [
        each.name for each in trace.operators
    ]


def test_slices_of_phases_modules_and_operators() -> None:
    found = events(STEP)
    require_schema(found)
    slices = [
        (event["tid"], event["name"], event["ts"], event["dur"]) for event in found if event["ph"] == "X"
    ]
    assert [each for each in slices if each[0] < 2] == [
        (0, "forward", 0, 2),
        (0, "backward", 2, 2),
        (0, "optimizer", 4, 1),
        (1, "layers", 0, 2),
        (1, "layers.0", 0, 2),
        (1, "layers.0.up", 0, 1),
        (1, "layers", 2, 2),
        (1, "layers.0", 2, 2),
        (1, "layers.0.up", 2, 2),
        (1, "(optimizer)", 4, 1),
    ]
    operators = [event for event in found if event["ph"] == "X" and event["tid"] == 2]
    assert operators[2]["args"] == {
        "module": "layers.0.up", "source": "model.py:7", "node": "MmBackward0", "FLOPs": 50,
        "recomputed": True,
    }  # fmt: skip


def test_counters_have_all_bytes_and_those_of_each_part() -> None:
    def counted(name: str) -> list[tuple[float, int]]:
        return [(each["ts"], each["args"]["bytes"]) for each in events(STEP) if each["name"] == name]

    assert counted("device bytes") == [(0, 100), (0.5, 140), (2.5, 100), (3.5, 160), (4.5, 60)]
    assert counted("host bytes") == [(1.5, 8)]
    assert counted("device bytes: saved") == [(0, 0), (0.5, 40), (2.5, 0)]
    assert counted("device bytes: parameters") == [(0, 100), (4.5, 0)]


def test_each_rank_is_a_process_of_the_trace() -> None:
    names = {
        event["pid"]: event["args"]["name"]
        for event in events(STEP, replace(STEP, rank=1))
        if event["name"] == "process_name"
    }
    assert names == {0: "rank 0: full on single", 1: "rank 1: full on single"}
