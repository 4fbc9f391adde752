"""The step time of a baseline, from the twins of all trials that are compared with it.

Every trial times a twin of its own next to it, so a ratio holds whatever the machine does meanwhile; a step
time does not. Speeds that follow from one pooled step time and the ratios rank trials as the ratios do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import median

from harness.records.record import Record
from harness.report.facts.baseline import is_sharded, saves


def pooled_step_times(records: Sequence[Record], settings: Sequence[str]) -> list[float | None]:
    """Return the pooled step time of the baseline of each record, in seconds; `None` without any twin.

    Args:
        settings: what each shares with the trials that it is compared with.
    """
    keys = [_baseline_key(record, setting) for record, setting in zip(records, settings, strict=True)]
    samples: dict[Hashable, list[float]] = {}
    for record, key in zip(records, keys, strict=True):
        if record.time is not None:
            samples.setdefault(key, []).extend(record.time.samples_s.twin)
    pooled = {key: median(found) for key, found in samples.items() if found}
    return [pooled.get(key) for key in keys]


def _baseline_key(record: Record, setting: str) -> Hashable:
    """Return what two trials share whose twins are the same model, which may be sharded."""
    is_shard_alone = is_sharded(record.experiment) and saves(record.experiment)
    return setting, repr(record.experiment["shard"]) if is_shard_alone else None
