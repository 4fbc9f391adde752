"""Snapshots are read by torch's own parser, which finds in them the bytes of the step."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
from torch.cuda import _memory_viz

from harness.measure.step import instrument
from harness.measure.step_trace import traced
from harness.records.step_trace import StepTrace
from harness.report.formats.memory_viz import to_memory_viz
from tests.harness.measure.metered import tokens, transformer
from tests.harness.step_fixture import STEP


def loaded(*traces: StepTrace) -> dict[str, Any]:
    snapshot: dict[str, Any] = pickle.loads(to_memory_viz(traces))
    return snapshot


def totals(snapshot: dict[str, Any], device: int = 0) -> list[int]:
    """Return the bytes before the first event and after each that gives or takes, led back from the end."""
    steps = {"alloc": 1, "free_completed": -1}
    events = [event for event in snapshot["device_traces"][device] if event["action"] in steps]
    at_end = sum(each["active_size"] for each in snapshot["segments"] if each["device"] == device)
    running = [at_end]
    for event in reversed(events):
        running.append(running[-1] - steps[event["action"]] * event["size"])
    return running[::-1]


@pytest.mark.parametrize("region", ["none", "full"])
def test_torch_reads_the_step_and_finds_its_peak(region: str) -> None:
    report = instrument(transformer(region), tokens())
    snapshot = loaded(traced(report, rank=0))
    assert max(totals(snapshot)) == report.memory.peak_bytes
    live = sum(each["active_size"] for each in snapshot["segments"])
    # torch sums up segments and compares them with their blocks, or raises
    assert f"total_allocated: {_memory_viz.Bytes(live)}" in _memory_viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}\n" in _memory_viz.segsum(snapshot)
    told = _memory_viz.trace(snapshot)
    assert told.count("cudaMalloc") == sum(
        event["action"] == "segment_alloc" for event in snapshot["device_traces"][0]
    )
    sizes = _memory_viz.segments(snapshot, format_flamegraph=lambda lines: lines)
    assert sum(int(line.rsplit(" ", 1)[1]) for line in sizes.splitlines()) == live
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)


def test_a_storage_is_a_segment_with_its_place_in_the_model() -> None:
    snapshot = loaded(STEP)
    assert totals(snapshot) == [100, 140, 100, 160, 60]
    (gradient,) = snapshot["segments"]
    assert (gradient["total_size"], gradient["device"]) == (60, 0)
    frames = [(each["name"], each["filename"], each["line"]) for each in gradient["blocks"][0]["frames"]]
    assert frames == [
        ("gradients 5x3 float32", "storage", 0),
        ("aten.mm.default", "operator", 0),
        ("layers.0.up", "model.py", 7),
    ]
    allocated = [event["addr"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    freed = [event["addr"] for event in snapshot["device_traces"][0] if event["action"] == "free_completed"]
    assert (len(set(allocated)), freed[0]) == (2, allocated[0])
    assert re.search(r"layers\.0\.up", _memory_viz.segments(snapshot, format_flamegraph=lambda lines: lines))


def test_a_storage_of_another_size_is_another_segment() -> None:
    grown = replace(STEP, changes=(*STEP.changes, STEP.changes[3]._replace(delta=4)))
    assert totals(loaded(grown))[-1] == 64


def test_each_rank_is_a_device() -> None:
    snapshot = loaded(replace(STEP, rank=2))
    assert [len(each) for each in snapshot["device_traces"]] == [0, 0, 10]
    assert {each["device"] for each in snapshot["segments"]} == {2}
