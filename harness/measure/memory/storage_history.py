"""The bytes of a step as they came and went, and what a record says of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

from harness.records.measured import (
    PEAK_PARTS,
    LivingTensor,
    MeasuredMemory,
    Moment,
    SavedTensor,
    StageAction,
)
from strategies.step.ledger import Peak, highest
from strategies.step.live_storages import RANDOM_STATE

LARGEST_SAVED = 20
LARGEST_AT_PEAK = 20
MOST_MOMENTS = 200

T = TypeVar("T")


class Birth(NamedTuple):
    """The operator that made a storage in a step, and where; all fields are those of `LivingTensor`."""

    op: str = ""
    module: str = ""
    source: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


_STOOD = Birth()
"""Of what the step has not made."""


class StorageChange(NamedTuple):
    """A storage is made, gets another size, or dies.

    Fields:
        delta: bytes by which it grows.
        part: what the storage is, one of `PEAK_PARTS`.
        is_activation: whether forward or backward has made it, and it is no gradient of a parameter.
        on_host: whether it lies in host memory while the model computes elsewhere.
        birth: what made the storage; nothing of one that stood before the step.
    """

    delta: int
    phase: str
    module: str
    part: str
    is_activation: bool = False
    on_host: bool = False
    birth: Birth = _STOOD


def in_order(changes: Iterable[tuple[int, StorageChange]]) -> list[StorageChange]:
    """Return changes in order of time, of storages that die side by side the oldest first.

    Their order is none of the step's: autocast keeps casts in a table by address, and drops them at once.

    Args:
        changes: each with the number of its storage, in order of birth.
    """
    ordered: list[StorageChange] = []
    for (is_death, _), some in groupby(changes, key=_death_and_place):
        ordered += [change for _, change in (sorted(some) if is_death else some)]
    return ordered


def _death_and_place(numbered: tuple[int, StorageChange]) -> tuple[bool, tuple[str, str]]:
    _, change = numbered
    return change.delta < 0, (change.phase, change.module)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageHistory:
    """All storages of a step on one rank.

    Fields:
        start: bytes on the device before the step, by part; of what `zero_grad` drops too.
        stretches: changes in order of time: while gradients are dropped, in forward and backward of each
            micro-batch, in the optimizer.
        saved: what forward has left for backward, in order of birth; of several forwards that with the most.
    """

    start: Mapping[str, int]
    start_host_bytes: int
    stretches: Sequence[Sequence[StorageChange]]
    saved: Sequence[SavedTensor]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    def memory(self) -> MeasuredMemory:
        """Return what a record says of it."""
        on_device = [change for change in self._changes() if not change.on_host]
        start_bytes = sum(self.start.values())
        peak, until = highest(start_bytes, on_device)
        activation_peak, _ = highest(0, (change for change in on_device if change.is_activation))
        host_peak, _ = highest(
            self.start_host_bytes, (change for change in self._changes() if change.on_host)
        )
        by_module: Counter[str] = Counter()
        for tensor in sorted(self.saved, key=_largest_first):
            by_module[tensor.module] += tensor.bytes
        return MeasuredMemory(
            saved_bytes=sum(tensor.bytes for tensor in self.saved),
            peak_bytes=peak.nbytes,
            activation_peak_bytes=activation_peak.nbytes,
            peak_phase=peak.phase,
            peak_module=peak.module,
            peak_parts=self._parts_after(on_device[:until]),
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes,
            host_peak_bytes=host_peak.nbytes,
            random_state_bytes=sum(tensor.bytes for tensor in self.saved if tensor.op == RANDOM_STATE),
            largest_saved=tuple(sorted(self.saved, key=_largest_first)[:LARGEST_SAVED]),
            saved_by_module=dict(by_module),
            largest_at_peak=tuple(_living_after(on_device[:until])[:LARGEST_AT_PEAK]),
            timeline=_timeline(start_bytes, on_device),
        )

    def actions(self, names: Sequence[str]) -> tuple[StageAction, ...]:
        """Return the highest total in each action of a schedule; where there are too many, of neighbours.

        Args:
            names: all actions in order of time, each of which is one of `stretches`; none without a schedule.
        """
        running = sum(self.start.values())
        found: list[StageAction] = []
        # what is dropped before the first action is its own stretch, and so is the optimizer
        for name, stretch in zip(["", *names], self.stretches, strict=False):
            peak, _ = highest(running, on_device := [change for change in stretch if not change.on_host])
            running += sum(change.delta for change in on_device)
            found.append(StageAction(action=name, bytes=peak.nbytes))
        return tuple(max(group, key=_action_bytes) for group in _neighbours(found[1:]))

    def _changes(self) -> Iterator[StorageChange]:
        for stretch in self.stretches:
            yield from stretch

    def _parts_after(self, changes: Iterable[StorageChange]) -> dict[str, int]:
        """Return what lies on the device after `changes`; a part without bytes is missing."""
        parts = Counter(self.start)
        for change in changes:
            parts[change.part] += change.delta
        return {part: parts[part] for part in PEAK_PARTS if parts[part]}


def _living_after(changes: Iterable[StorageChange]) -> list[LivingTensor]:
    """Return what the step has made and lives after `changes`, largest first, then in order of birth."""
    living: Counter[tuple[str, Birth]] = Counter()
    counts: Counter[tuple[str, Birth]] = Counter()
    for change in changes:
        kind = change.part, change.birth
        living[kind] += change.delta
        counts[kind] += 1 if change.delta > 0 else -1
    return sorted(
        (
            LivingTensor(bytes=nbytes, count=max(counts[part, birth], 1), part=part, **birth._asdict())
            for (part, birth), nbytes in living.items()
            if birth != _STOOD and nbytes > 0
        ),
        key=_largest_first,
    )


def _largest_first(tensor: SavedTensor | LivingTensor) -> int:
    return -tensor.bytes


def _timeline(start_bytes: int, changes: Iterable[StorageChange]) -> tuple[Moment, ...]:
    """Return the step in order of time; where there are too many stays, the highest of neighbours."""
    highest = (max(group, key=_nbytes) for group in _neighbours(_stays(start_bytes, changes)))
    return tuple(Moment(bytes=stay.nbytes, phase=stay.phase, module=stay.module) for stay in highest)


def _neighbours(events: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield events in order of time, in at most `MOST_MOMENTS` groups."""
    width = math.ceil(len(events) / MOST_MOMENTS) or 1
    yield from (events[first : first + width] for first in range(0, len(events), width))


def _stays(start_bytes: int, changes: Iterable[StorageChange]) -> list[Peak]:
    """Return the highest total in each stay in a module, in order of time."""
    running = start_bytes
    stays: list[Peak] = []
    for change in changes:
        running += change.delta
        here = Peak(running, change.phase, change.module)
        if stays and stays[-1][1:] == here[1:]:
            stays[-1] = max(stays[-1], here, key=_nbytes)
        else:
            stays.append(here)
    return stays


def _nbytes(stay: Peak) -> int:
    return stay.nbytes


def _action_bytes(action: StageAction) -> int:
    return action.bytes
