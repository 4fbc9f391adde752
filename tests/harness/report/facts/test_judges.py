"""Plans at the peaks of others are called after them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.records.record import Record
from harness.report.facts.sweep_records import named
from tests.harness import records_fixture

PEAK, HOST = 12_345_679, 987_654


def measured(
    ac: str, peak_bytes: int, host_bytes: int = 0, mesh: str = "single", **options: object
) -> Record:
    record = records_fixture.record(records_fixture.experiment(ac, mesh, ac=options))
    assert record.memory is not None
    memory = replace(record.memory, peak_bytes=peak_bytes, host_peak_bytes=host_bytes)
    return replace(record, memory=memory)


def plan(peak_bytes: int, host_bytes: int = 0, **options: object) -> Record:
    given = {"budget_gib": peak_bytes / 2**30 + 1e-10, "host_gib": host_bytes / 2**30 + 1e-10}
    return measured("budget", peak_bytes - 1, **{**given, "objective": "flops", **options})  # type: ignore[arg-type]


def choices(*records: Record) -> list[str]:
    return [entry.choice for entry in named(records)]


def test_a_plan_is_called_after_what_has_its_peak() -> None:
    others = measured("full", PEAK), measured("offload", PEAK + 1, HOST)
    assert choices(*others, plan(PEAK), plan(PEAK + 1, HOST)) == [
        "full",
        "offload",
        "budget at full",
        "budget at offload",
    ]


def test_variants_of_one_peak_are_named_together() -> None:
    same = [measured(ac, PEAK) for ac in ("full", "accelerate", "trl", "transformers", "fairscale")]
    assert choices(*same, plan(PEAK))[-1] == "budget at full, accelerate, trl and 2 more"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(measured("full", PEAK + 1), id="another peak"),
        pytest.param(measured("full", PEAK, HOST), id="other bytes on the host"),
        pytest.param(measured("full", PEAK, mesh="shard2"), id="another mesh"),
        pytest.param(measured("none", PEAK), id="the plain model"),
    ],
)
def test_other_plans_keep_their_names(other: Record) -> None:
    assert choices(other, plan(PEAK))[-1] == "budget"


def test_plans_that_differ_in_other_options_keep_their_names() -> None:
    eager, compiled = (plan(PEAK, executor=executor) for executor in ("eager", "compiled"))
    first, second = choices(measured("full", PEAK), eager, compiled)[1:]
    assert first != second


def test_a_plan_of_another_objective_is_no_judge() -> None:
    assert choices(measured("full", PEAK), plan(PEAK, objective="both"))[-1] == "budget"
