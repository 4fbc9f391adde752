"""What differs between two results of the compatibility suite, and what makes one bad."""

from __future__ import annotations

from typing import Any

import pytest

from bench.compat import counted, differences, is_bad
from bench.compat_facts import QUESTIONS, facts

_CASE = '<testcase classname="tests.strategies.ac.test_full" name='
_REPORT = f"""
<testsuites><testsuite>
{_CASE}"test_parity[mesh]"/>
{_CASE}"test_bytes"><failure message="assert 1 == 2&#10;more">…</failure></testcase>
{_CASE}"test_set_up"><error message="no such file">…</error></testcase>
{_CASE}"test_runs"><skipped message="needs a GPU"/></testcase>
</testsuite></testsuites>
"""


def _results(**changes: Any) -> dict[str, Any]:
    return {
        "facts": {"reduces in": "bfloat16"},
        "numbers": {"ac=full": {"verdict": "neutral", "saved_bytes": 8}},
        "tests": {"fsdp": {"passed": 3, "failed": 0, "skipped": 0, "failures": {}}},
    } | changes


def test_a_report_of_tests() -> None:
    assert counted(_REPORT) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": {
            "tests/strategies/ac/test_full.py::test_bytes": "assert 1 == 2",
            "tests/strategies/ac/test_full.py::test_set_up": "no such file",
        },
    }


FAILED = {"fsdp": {"passed": 2, "failed": 1, "skipped": 0, "failures": {"test_parity": "assert 1 == 2"}}}
DIFFERS = {"ac=full": {"verdict": "differs", "saved_bytes": 8}}


@pytest.mark.parametrize(
    ("changes", "lines", "bad"),
    [
        pytest.param({}, [], False, id="nothing"),
        pytest.param(
            {"facts": {"reduces in": "float32"}}, ["reduces in: bfloat16 -> float32"], False, id="a fact"
        ),
        pytest.param({"facts": {}, "numbers": {}}, [], False, id="parts that did not run"),
        pytest.param({"numbers": DIFFERS}, ["ac=full: verdict: neutral -> differs"], True, id="a verdict"),
        pytest.param({"tests": FAILED}, ["fsdp: failed tests: [] -> ['test_parity']"], True, id="a test"),
    ],
)
def test_what_differs(changes: dict[str, Any], lines: list[str], *, bad: bool) -> None:
    after = _results(**changes)
    assert (differences(_results(), after), is_bad(after)) == (lines, bad)


def test_this_torch_answers_every_question() -> None:
    found = facts()
    assert found.keys() == QUESTIONS.keys()
    assert {type(answer) for answer in found.values()} <= {bool, int, str}
