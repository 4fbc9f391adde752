from __future__ import annotations

from typing import Any

import pytest

from harness.records.record import Record
from harness.records.statistics import Ratio
from harness.report.facts.pareto import TradeOff, dominates, pareto_front
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import PARTS, experiment, failed, rank_result, record, trial


def on_gpu(share: float, host_peak_bytes: int, **environment: Any) -> Record:
    result = rank_result()
    peak_bytes = int(share * result["baseline"]["memory"]["peak_bytes"])
    result["memory"] |= {"peak_bytes": peak_bytes, "host_peak_bytes": host_peak_bytes}
    result["environment"] |= environment
    return record(experiment("offload"), result)


def point(peak_bytes: int, median: float, spread: float = 0.0) -> TradeOff:
    (entry,) = sweep_of([record()], name="demo").entries
    ratio = Ratio(median=median, low=median - spread, high=median + spread)
    return TradeOff(entry=entry, peak_bytes=peak_bytes, ratio=ratio)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param(point(1, 1.0), point(2, 1.1), True, id="less of both"),
        pytest.param(point(1, 1.0), point(2, 1.0), True, id="less memory, the same time"),
        pytest.param(point(1, 1.1), point(2, 1.0), False, id="less memory, more time"),
        pytest.param(point(1, 1.0), point(1, 1.1), True, id="the same memory, less time"),
        pytest.param(point(1, 1.0, 0.1), point(1, 1.1, 0.1), False, id="less time within the noise"),
        pytest.param(point(1, 1.0), point(1, 1.0), False, id="the same"),
        pytest.param(point(2, 0.5), point(1, 1.0), False, id="more memory"),
    ],
)
def test_dominance(one: TradeOff, other: TradeOff, expected: bool) -> None:
    assert dominates(one, other) is expected


def test_the_front_names_what_dominates_the_rest() -> None:
    records = [
        trial("none", 100, 1.0),
        trial("full", 40, 1.3),
        trial("offload", 40, 1.2),
        trial("nested", 20, 1.5),
    ]
    found = pareto_front(sweep_of(records, name="demo").entries)
    assert [each.entry.variant for each in found.best] == ["nested", "offload", "none"]
    assert {records[1].trial_id: "offload"} == {key: by.entry.variant for key, by in found.dominated.items()}


def test_what_differs_did_nothing_or_was_not_timed_is_on_no_front() -> None:
    different = {"equal": False, "max_abs": 1.0, "max_rel": 1.0, "first_difference": None}
    records = [
        trial("full", 1, 1.0, parity={PARTS[0]: different}),
        trial("selective_op", 1, 1.0, observation={"named": ["mm"], "never_fired": ["mm"]}),
        trial("offload", 1, 1.0, time={"variant_s": []}),
        failed("oom", experiment("nested")),
    ]
    assert {each.verdict for each in records} == {"differs", "inert", "neutral", "unverified"}
    assert pareto_front(sweep_of(records, name="demo").entries).points == ()


@pytest.mark.parametrize(
    ("offload", "best"),
    [
        pytest.param(on_gpu(0.1, 9, driver=None), ["full", "none"], id="to the same memory"),
        pytest.param(on_gpu(0.1, 9, driver="580.1"), ["offload", "none"], id="from a GPU"),
        pytest.param(on_gpu(0.1, 0, driver=None), ["offload", "none"], id="nothing on the host"),
    ],
)
def test_what_a_cpu_moves_to_its_own_memory_is_on_no_front(offload: Record, best: list[str]) -> None:
    records = [trial("none", 20_971_520, 1.0), trial("full", 10_485_760, 1.3), offload]
    found = pareto_front(sweep_of(records, name="demo").entries)
    assert [each.entry.choice for each in found.best] == best
    assert len(found.points) + len(found.as_on_gpu) == len(records)
