"""Findings of several ranks are one."""

from __future__ import annotations

from harness.records.probed import Finding, Probed, merge_probed

OPEN = Finding(probe="input_dependence", verdict="unverified", reason="nothing")
WRONG = Finding(probe="leak", verdict="differs", reason="grows", part="leak", name="(live storages)", rank=1)


def test_what_differs_on_one_rank_differs() -> None:
    merged = merge_probed(
        [
            Probed(asked=("leak",), finding=OPEN, reads=("a",), notes=("n",)),
            Probed(asked=("leak",), finding=WRONG, recomputation="mm", reads=("b", "a"), notes=("n",)),
        ]
    )
    assert merged is not None
    assert (merged.finding, merged.differs, merged.unproven) == (WRONG, "grows", None)
    assert (merged.recomputation, merged.reads, merged.notes) == ("mm on rank 1", ("a", "b"), ("n",))


def test_nothing_is_merged_to_nothing() -> None:
    assert merge_probed([]) is None


def test_the_difference_alone() -> None:
    assert OPEN.first is None
    assert (WRONG.first or {})["part"] == "leak"
