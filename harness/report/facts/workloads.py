"""Workloads: the parts of a sweep that are answered apart, because their numbers compare with no other's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.report.facts.sweep_records import Entry, SweepRecords, grouped

MOST_WORKLOADS = 6
"""More models and recipes than these are left to the tables."""

_COMMIT_LENGTH = 10
_ENVIRONMENT = ("torch", "cuda", "driver", "python", "cpus", "commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model with its recipe in one environment, on every mesh.

    Fields:
        name: what tells it from the others of the sweep.
    """

    name: str
    sweep: SweepRecords


def workloads(sweep: SweepRecords) -> tuple[Workload, ...]:
    """Return the workloads of a sweep, the best examined first."""
    groups = grouped((entry.workload, entry) for entry in sweep.entries)
    ordered = sorted(groups.values(), key=measured_count, reverse=True)
    names = _names({entries[0].workload: entries[0] for entries in ordered})
    return tuple(
        Workload(name=names[entries[0].workload], sweep=replace(sweep, entries=tuple(entries)))
        for entries in ordered
    )


def measured_count(entries: Sequence[Entry]) -> int:
    """Return how many trials were measured."""
    return sum(entry.record.memory is not None for entry in entries)


def _names(first: Mapping[str, Entry]) -> dict[str, str]:
    """Return a name for each workload; environments are told apart where nothing else does it."""
    found = {key: ", ".join(filter(None, (entry.model, entry.other_fields))) for key, entry in first.items()}
    for key in _alike(found):
        environment = first[key].record.environment
        versions = (f"{each} {environment.get(each)}" for each in _differing(first.values()))
        found[key] = ", ".join([found[key], *map(_shortened, versions)])
    for key in _alike(found):
        found[key] += f", environment {first[key].record.environment_id}"
    return found


def _alike(names: Mapping[str, str]) -> list[str]:
    shared = {name for name, count in Counter(names.values()).items() if count > 1}
    return [key for key, name in names.items() if name in shared]


def _differing(entries: Iterable[Entry]) -> list[str]:
    environments = [entry.record.environment for entry in entries]
    return [key for key in _ENVIRONMENT if len({str(each.get(key)) for each in environments}) > 1]


def _shortened(version: str) -> str:
    """Return `commit 0123456789-dirty` for a whole commit."""
    what, _, value = version.partition(" ")
    digits, dash, state = value.partition("-")
    return f"{what} {digits[:_COMMIT_LENGTH]}{dash}{state}" if what == "commit" else version
