"""Plans of `ac=budget` at the peak of another variant, which are called after it: `budget at full`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.records.record import Record
from harness.report.facts.labels import Label

_GIB = 1 << 30
_FEW = 3
"""Variants of one peak that are all named."""


def called_after(labels: Sequence[Label], records: Sequence[Record], settings: Sequence[str]) -> list[Label]:
    """Return `labels`, in which plans at the peaks of others have their names in place of bytes.

    Args:
        settings: what each must share with another record to be compared with it.
    """
    at: dict[tuple[str, int, int], list[str]] = {}
    for label, record, setting in zip(labels, records, settings, strict=True):
        if record.memory is not None and _ac(record).get("name") not in {"none", "budget"}:
            peaks = record.memory.peak_bytes, record.memory.host_peak_bytes
            at.setdefault((setting, *peaks), []).append(label.choice)
    named = [
        _after(label, at.get((setting, *_budget_of(record)), []))
        for label, record, setting in zip(labels, records, settings, strict=True)
    ]
    own: dict[tuple[str, str], set[str]] = {}
    for label, new, setting in zip(labels, named, settings, strict=True):
        own.setdefault((setting, new.choice), set()).add(label.choice)
    # two plans at one peak, of other options, keep the names that tell them apart
    return [
        new if len(own[setting, new.choice]) == 1 else label
        for label, new, setting in zip(labels, named, settings, strict=True)
    ]


def _after(label: Label, judged: Sequence[str]) -> Label:
    if not judged:
        return label
    more = f" and {len(judged) - _FEW} more" if len(judged) > _FEW else ""
    return replace(label, choice=f"budget at {', '.join(judged[:_FEW])}{more}")


def _budget_of(record: Record) -> tuple[int, int]:
    """Return the bytes that a plan may take on the device and on the host; what is none has no such bytes."""
    options = _ac(record)
    budget = options.get("budget_gib")
    is_plan = options.get("name") == "budget" and options.get("objective") == "flops"
    if not is_plan or not isinstance(budget, int | float):
        return -1, -1
    host = options.get("host_gib")
    return int(budget * _GIB), int(host * _GIB) if isinstance(host, int | float) else 0


def _ac(record: Record) -> Mapping[str, Any]:
    options = record.experiment.get("ac")
    return options if isinstance(options, Mapping) else {}
