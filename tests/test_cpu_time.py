from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cpu_time import COST, FAILS_S, SLOW_S, CpuTime, cpu_s, slowness

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
    measured = after(spent_s, is_slow)
    assert (measured.too_dear(), measured.too_cheap()) == (dear, cheap)
    assert measured.failing() == []


@pytest.mark.parametrize(
    ("spent_s", "is_slow", "times_slower", "fails"),
    [
        pytest.param(4 * SLOW_S, False, 1.0, 30, id="several times what is allowed"),
        pytest.param(4 * SLOW_S, True, 1.0, None, id="it is marked"),
        pytest.param(SLOW_S * 1.5 * 2, False, 1.0, None, id="a machine slower and busier while it ran"),
        pytest.param(4 * SLOW_S * 1.5 * 2, False, 1.5 * 2, 90, id="several times, slower and busier"),
        pytest.param(2 * SLOW_S * 1.5 * 2, False, 1.5 * 2, None, id="twice, slower and busier"),
    ],
)
def test_no_machine_fails_a_run(
    spent_s: float, is_slow: bool, times_slower: float, fails: int | None
) -> None:
    expected = [] if fails is None else [f"a: fails the run; its limit here is {fails} CPU seconds"]
    assert after(spent_s, is_slow, times_slower).failing() == expected


def test_the_machine_is_measured() -> None:
    assert 1.0 <= slowness() < FAILS_S


def after(spent_s: float, is_slow: bool, times_slower: float = 1.0) -> CpuTime:
    """Return what was measured once one test has run."""
    report = pytest.TestReport(
        nodeid="a",
        location=("a.py", 1, "a"),
        keywords={},
        outcome="passed",
        longrepr=None,
        when="call",
        user_properties=[(COST, (spent_s, is_slow, times_slower))],
    )
    measured = CpuTime()
    measured.pytest_runtest_logreport(report)
    return measured
