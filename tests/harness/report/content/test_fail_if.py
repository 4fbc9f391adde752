# ruff: noqa: RUF001 (times, as reports write it)
"""A pipeline fails on what it names, on what is missing, and on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.records.record import Record
from harness.records.store import Store
from harness.report.content.fail_if import QUANTITIES, failing, parse
from harness.report.facts.sweep_records import sweep_of
from harness.report.main import main
from tests.harness.records_fixture import PARTS, experiment, failed, rank_result, record

_DIFFERENT = {"equal": False, "max_abs": 1.0, "max_rel": 1.0, "first_difference": None}


def peaking(peak_bytes: int, ac: str = "full", **changes: Any) -> Record:
    result = rank_result()
    result["memory"]["peak_bytes"] = peak_bytes
    for part, change in changes.items():
        result[part] |= change
    return record(experiment(ac), result)


BEFORE = [record(experiment("none")), peaking(10_000_000)]


@pytest.mark.parametrize(
    ("condition", "after", "lines"),
    [
        pytest.param("peak_bytes>1.02", [BEFORE[0], peaking(10_200_000)], [], id="as much as may be"),
        pytest.param(
            "peak_bytes>1.02",
            [BEFORE[0], peaking(11_000_000)],
            ["full on single: 9.5 MiB → 10.5 MiB (1.10×)"],
            id="more",
        ),
        pytest.param(
            "peak_bytes!=1",
            [BEFORE[0], peaking(10_000_001)],
            ["full on single: 9.5 MiB → 9.5 MiB (1×)"],
            id="a byte",
        ),
        pytest.param("offloaded_bytes>1", BEFORE, [], id="nothing before, nothing now"),
        pytest.param(
            "offloaded_bytes>1",
            [BEFORE[0], peaking(1, observation={"offloaded_bytes": 1024})],
            ["full on single: 0 B → 1.0 KiB (inf×)"],
            id="nothing before",
        ),
        pytest.param(
            "peak_bytes>1.02",
            [BEFORE[0], failed("oom")],
            ["full on single: 9.5 MiB → no number: oom, unverified"],
            id="what failed has no number",
        ),
        pytest.param(
            "peak_bytes>1.02", BEFORE[:1], ["full on single: no record in after"], id="what is missing"
        ),
        pytest.param("verdict!=neutral", BEFORE, [], id="all neutral"),
        pytest.param(
            "verdict != neutral",
            [BEFORE[0], peaking(1, parity={PARTS[2]: _DIFFERENT})],
            ["full on single: neutral → differs"],
            id="a word",
        ),
        pytest.param(
            "status==oom",
            [*BEFORE, failed("oom", experiment("nested"))],
            ["nested on single: - → oom"],
            id="what only the candidate has",
        ),
    ],
)
def test_what_fails(condition: str, after: list[Record], lines: list[str]) -> None:
    found = failing(parse(condition), sweep_of(BEFORE, name="before"), sweep_of(after, name="after"))
    assert list(found) == lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "peak",
            "must be a name, one of >= <= == != > <, and a value, as in 'peak_bytes>1.02' or "
            "'verdict!=neutral', got 'peak'",
            id="no comparison",
        ),
        pytest.param(
            "peak_byte>1",
            f"unknown quantity 'peak_byte'; did you mean 'peak_bytes'? quantities: {', '.join(QUANTITIES)}; "
            "words: status, verdict",
            id="an unknown name",
        ),
        pytest.param(
            "verdict>neutral", "verdict is a word, which is compared with == or !=, got '>'", id="an order"
        ),
        pytest.param(
            "verdict!=neutrl",
            "unknown verdict 'neutrl'; one of neutral, differs, inert, unverified",
            id="an unknown word",
        ),
        pytest.param(
            "peak_bytes>nan",
            "peak_bytes is a number, of which the ratio candidate / baseline is compared; must be a number, "
            "got 'nan'",
            id="no number",
        ),
    ],
)
def test_what_is_no_condition(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared whole)
        parse(text)
    assert str(caught.value) == message


def test_the_exit_status_is_for_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, records in (("a", BEFORE), ("b", [BEFORE[0], peaking(11_000_000)])):
        for each in records:
            Store(tmp_path / name).write(each)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert main([*folders, "--fail-if", "peak_bytes>1.2"]) == 0
    assert capsys.readouterr().out.endswith("fail-if peak_bytes>1.2: no trials\n")
    assert main([*folders, "--fail-if", "peak_bytes>1.02", "--fail-if", "verdict!=neutral"]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "fail-if peak_bytes>1.02: 1 trial",
        "  full on single: 9.5 MiB → 10.5 MiB (1.10×)",
        "fail-if verdict!=neutral: no trials",
    ]
