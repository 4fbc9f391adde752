"""The baseline of a trial in words; a sharded trial is compared with a model sharded on the same mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.records.record import is_baseline
from harness.report.facts.document import CodeText, Line, plain
from harness.report.facts.labels import group_name

_PLAIN = "the plain model"
_SAVING = ("ac", "chunk")
_NOTHING = ("none", "?")


def is_sharded(experiment: Mapping[str, Any]) -> bool:
    """Return whether a sharding variant decides where operators run."""
    return group_name(experiment, "shard") not in _NOTHING


def saves(experiment: Mapping[str, Any]) -> bool:
    """Return whether a strategy is to save activations."""
    return any(group_name(experiment, group) not in _NOTHING for group in _SAVING)


def baseline(experiment: Mapping[str, Any]) -> Line:
    """Return the words for a trial's twin: what saves is compared with what is sharded alike."""
    if not is_sharded(experiment):
        return (_PLAIN,)
    if saves(experiment):
        return (CodeText(text=f"shard={group_name(experiment, 'shard')}"), " alone")
    return (CodeText(text="shard=none"), " on the same mesh")


def of_baseline(experiment: Mapping[str, Any]) -> Line:
    """Return `the plain model's`, or the same of what else a trial is compared with."""
    return (f"{_PLAIN}'s",) if not is_sharded(experiment) else ("that of ", *baseline(experiment))


def of_baselines(experiments: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return `the plain model's` of many trials, and which baselines they have, in words."""
    tried = [experiment for experiment in experiments if not is_baseline(experiment)]
    found = {plain(baseline(experiment)): plain(of_baseline(experiment)) for experiment in tried}
    if len(found) > 1:
        return "the baseline's", f"each trial's own baseline ({', '.join(sorted(found))})"
    ((words, owning),) = found.items() or {(_PLAIN, f"{_PLAIN}'s")}
    return owning, words
