"""`sweep=judge`: the plan of `ac=budget` at the peak that a point has measured, as one more point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from omegaconf import DictConfig, open_dict

from harness.records.record import Record

_GIB = 1 << 30
_STEPS = 10_000_000_000
"""Parts of a GiB, in decimals, that tell single bytes apart."""

_OWN_JUDGES = frozenset({"none", "budget"})
"""Variants that no plan is put next to: one recomputes nothing, the other is the plan."""


def plans_at_peaks(
    points: Iterable[tuple[DictConfig, str, str]],
    records: Mapping[str, Record],
    budget: DictConfig,
    tell: Callable[[str], None],
) -> Iterator[tuple[str, DictConfig]]:
    """Yield for each point that has measured a peak its name in messages, and the cheapest plan of that peak.

    Args:
        points: configurations with their trial_ids, and what messages call them.
        budget: options of `ac=budget` as the configuration has them.
        tell: hears why a point has no plan next to it.
    """
    for config, trial, label in points:
        if config.ac.name in _OWN_JUDGES:
            continue
        record = records.get(trial)
        reason = _without_plan(record)
        if record is None or record.memory is None or reason:
            tell(f"judge: no plan next to {label}: {reason}")
            continue
        judge = config.copy()
        with open_dict(judge):
            judge.ac, judge.stage_ac = budget.copy(), []
            judge.ac.budget_gib = _gib(record.memory.peak_bytes)
            # plans of stages move nothing to the host
            judge.ac.host_gib = 0 if config.mesh.pp > 1 else _gib(record.memory.host_peak_bytes)
            judge.ac.objective = "flops"  # what the bound counts
            if config.compile != "none":
                judge.ac.executor = "compiled"
        yield label, judge


def _without_plan(record: Record | None) -> str:
    """Return why no plan is put next to a point; empty where one is."""
    if record is None:
        return "it has no record"
    if record.status != "ok":
        return f"it ended as {record.status}"
    return "its record has no peak" if record.memory is None else ""


def _gib(number_bytes: int) -> float:
    """Return bytes in GiB, with as few digits as tell them from one byte more."""
    return math.ceil(number_bytes / _GIB * _STEPS) / _STEPS
