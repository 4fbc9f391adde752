from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cpu_time import COST, FAILS_S, SLOW_S, CpuTime, cpu_s

BUSY_S = 0.3
BUSY = f"""
import time
while time.process_time() < {BUSY_S}:
    pass
print(flush=True)
input()
"""


def test_a_child_counts_while_it_lives_and_once_it_was_waited_for() -> None:
    before_s = cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living_s = cpu_s()
        child.communicate("\n")
    assert living_s - before_s > 0.9 * BUSY_S
    assert cpu_s() > 0.9 * BUSY_S + before_s


@pytest.mark.parametrize(
    ("spent_s", "is_slow", "dear", "cheap"),
    [
        pytest.param(
            SLOW_S + 1, False, ["a: took 11.0 CPU seconds; mark it slow or make it cheaper"], [], id="dear"
        ),
        pytest.param(SLOW_S + 1, True, [], [], id="slow"),
        pytest.param(SLOW_S / 2, False, [], [], id="neither"),
        pytest.param(SLOW_S / 2, True, [], [], id="slow on a better day"),
        pytest.param(1.0, True, [], ["a: took 1.0 CPU seconds; it is not slow"], id="no longer slow"),
    ],
)
def test_slow_means_what_was_measured(
    spent_s: float, is_slow: bool, dear: list[str], cheap: list[str]
) -> None:
    report = pytest.TestReport(
        nodeid="a",
        location=("a.py", 1, "a"),
        keywords={},
        outcome="passed",
        longrepr=None,
        when="call",
        user_properties=[(COST, (spent_s, is_slow))],
    )
    measured = CpuTime()
    measured.pytest_runtest_logreport(report)
    assert (measured.too_dear(), measured.too_cheap()) == (dear, cheap)
    assert measured.too_dear(FAILS_S) == []
