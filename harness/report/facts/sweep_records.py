"""A sweep as reports read it: its records with the names that tell them apart, and what is missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from harness.records.claims import is_abandoned
from harness.records.files import read_text
from harness.records.record import Record, is_baseline, validate
from harness.records.store import Store, Unreadable, parsed, trial_id
from harness.report.facts.baseline import of_baselines
from harness.report.facts.document import NOTHING, LinePart, Mark, Number, Statement, TrialName
from harness.report.facts.fields_read import as_read
from harness.report.facts.judges import called_after
from harness.report.facts.labels import Label, group_name, labels, mesh_sizes, variant_name
from harness.report.facts.number_words import escaped
from harness.report.facts.pareto import ParetoFront, pareto_front
from harness.report.facts.plan_notes import plan_notes
from harness.report.facts.pooled_baseline import pooled_step_times
from harness.report.facts.quantities import RATIO, STEP_TIME, Quantity
from harness.report.facts.shown_record import shown
from harness.report.facts.trial_notes import differences, notes

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MOST_BYTES = 2**30  # of a file of records, which holds those of a whole plan
_TRIAL_ID = re.compile(r"[0-9a-f]{12}")
_NONE: Mapping[str, str] = MappingProxyType({})
STRATEGIES = ("ac", "chunk", "shard", "wrap_order")
"""Fields in which a variant may differ from its twin."""


class UnreadableError(ValueError):
    """A folder or file without a record, or a file that is no list of records."""


@dataclass(frozen=True, kw_only=True)
class Entry(Label):
    """A record and what it is called within its sweep.

    Fields:
        name: `variant on mesh`, with the model where models differ.
        setting: what it must share with another trial to be compared with it.
        workload: what it shares with all trials that are answered together: the setting, on any mesh.
        twin_step_s: step time of its baseline: the median over the twins of all trials that have the same;
            `None` where none was timed.
        experiment: its experiment, without what the trial did not read.
        sweep: number of its sweep among compared ones.
    """

    record: Record
    experiment: Mapping[str, Any]
    name: str
    setting: str
    workload: str
    twin_step_s: float | None = None
    sweep: int = 0

    @property
    def trial_id(self) -> str:
        """Id of the trial."""
        return self.record.trial_id

    @property
    def trial(self) -> TrialName:
        """The trial by its name."""
        return TrialName(name=self.name, trial_id=self.trial_id)

    @property
    def family(self) -> str:
        """Its strategies without their options."""
        return variant_name(self.record.experiment)

    @property
    def model(self) -> str:
        """Name of the model."""
        return group_name(self.record.experiment, "model")

    @cached_property
    def is_baseline(self) -> bool:
        """True if it is the plain model, with which others are compared."""
        return is_baseline(self.record.experiment)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """All that is noted of it, in sentences."""
        return tuple(notes(self.record))

    @cached_property
    def plan_notes(self) -> tuple[str, ...]:
        """Those of its notes that say what became of plans."""
        return tuple(plan_notes(self.record))

    @cached_property
    def differences(self) -> tuple[str, ...]:
        """Those of its notes that say where it first differs from its twin."""
        return tuple(differences(self.record))

    @property
    def mark(self) -> Mark:
        """Its verdict, with what explains it."""
        record, about = self.record, "; ".join(self.notes)
        if record.status == "predicted" and record.parity is None:
            return Mark(text=NOTHING, about=about)
        if record.verdict == "neutral" and record.parity is not None and record.parity.level == "tolerance":
            return Mark(text="neutral (tolerance)", about=about)
        return Mark(text=record.verdict, about=about)

    @property
    def is_as_on_gpu(self) -> bool:
        """True if its peak is what a GPU would need: it moved to host memory, which a CPU has no other of."""
        memory = self.record.memory
        return memory is not None and memory.host_peak_bytes > 0 and is_on_cpu(self.record)

    def speed(self, quantity: Quantity) -> Number | None:
        """Return a speed at the pooled step time of the baseline times the ratio, so that both rank alike.

        Where there is no ratio, it is the speed that the record has.
        """
        measured, ratio = self.number(quantity), RATIO.of(self.record)
        step_s = STEP_TIME.of(self.record)
        if measured is None or step_s is None or not ratio or not self.twin_step_s:
            return measured
        value = measured.value * step_s / (self.twin_step_s * ratio)
        return replace(measured, value=value, path=f"pooled {measured.path}")

    def number(self, quantity: Quantity) -> Number | None:
        """Return a number of the record; `None` where the record has none."""
        value = quantity.of(self.record)
        if value is None:
            return None
        return Number(
            value=value, unit=quantity.unit, path=quantity.path, trial_id=self.trial_id, sweep=self.sweep
        )


@dataclass(frozen=True, kw_only=True)
class SweepRecords:
    """All records of a sweep.

    Fields:
        entries: one a record, baselines first within a setting.
        families: the strategies of the whole sweep, which its parts know too.
        waiting: trials that have a folder and no record yet.
        is_abandoned: no live command holds those trials: it was interrupted or has died.
        unreadable: files that should be records and are none.
    """

    name: str
    entries: tuple[Entry, ...]
    families: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    is_abandoned: bool = False
    unreadable: tuple[Unreadable, ...] = ()

    @cached_property
    def by_setting(self) -> Mapping[str, tuple[Entry, ...]]:
        """The entries that may be compared with one another."""
        groups = grouped((entry.setting, entry) for entry in self.entries)
        return {setting: tuple(group) for setting, group in groups.items()}

    @cached_property
    def baselines(self) -> tuple[str, str]:
        """`the plain model's`, or the same of what else trials are compared with, and which these are."""
        return of_baselines(record.experiment for record in self.records)

    @cached_property
    def fronts(self) -> Mapping[str, ParetoFront]:
        """The front of memory and time of each setting."""
        return {setting: pareto_front(entries) for setting, entries in self.by_setting.items()}

    @cached_property
    def on_front(self) -> frozenset[str]:
        """Ids of the trials on one of the fronts."""
        return frozenset(point.entry.trial_id for front in self.fronts.values() for point in front.best)

    @cached_property
    def models(self) -> frozenset[str]:
        """Names of the models."""
        return frozenset(entry.model for entry in self.entries)

    def place(self, entry: Entry) -> str:
        """Return the mesh of a trial, with the model where models differ."""
        return entry.mesh if len(self.models) == 1 else f"{entry.mesh}, {entry.model}"

    def where(self, entry: Entry) -> str:
        """Return mesh, model and recipe of a trial: what the trials of a setting share."""
        return f"{self.place(entry)}, {entry.other_fields}" if entry.other_fields else self.place(entry)

    @property
    def records(self) -> list[Record]:
        """The records alone."""
        return [entry.record for entry in self.entries]


def is_on_cpu(record: Record) -> bool:
    """Say if the ranks of a trial computed on a CPU, whose host memory is the memory of the device."""
    if record.outlook is not None and record.outlook.is_stand_in:
        return False
    return bool(record.environment) and record.environment.get("driver") is None


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, keys and values in their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def sentence(*parts: LinePart, of: Iterable[Entry] = ()) -> Statement:
    """Return a sentence that follows from the records `of`."""
    return Statement(line=parts, trial_ids=tuple(entry.trial_id for entry in of))


def load(root: Path, *, number: int = 0, odd: Mapping[str, str] = _NONE) -> SweepRecords:
    """Return the sweep in a folder, finished or not, or in a file that `docs.tools.records` has made of one.

    Args:
        number: number of this sweep among compared ones.
        odd: why a record cannot be shown, by trial_id; it is left out and listed.

    Raises:
        FileNotFoundError: there is neither.
        UnreadableError: the file is no list of records; the message says why.
    """
    if root.is_file():
        kept = _kept(root)
        return sweep_of(
            [record for record in kept if record.trial_id not in odd],
            name=root.stem,
            unreadable=[Unreadable(path=root / name, reason=reason) for name, reason in odd.items()],
            number=number,
        )
    if not root.is_dir():
        raise FileNotFoundError(root)
    # folders first: a trial that ends meanwhile is among the records or among the waiting, never in neither
    folders = [folder.name for folder in sorted(root.iterdir()) if _TRIAL_ID.fullmatch(folder.name)]
    scan = Store(root).scan()
    present = {record.trial_id for record in scan.records} | {
        each.path.parent.name for each in scan.unreadable
    }
    waiting = [name for name in folders if name not in present and (root / name).is_dir()]
    left_out = [Unreadable(path=Store(root).record_path(name), reason=reason) for name, reason in odd.items()]
    return sweep_of(
        [record for record in scan.records if record.trial_id not in odd],
        name=root.resolve().name,
        waiting=waiting,
        is_abandoned=is_abandoned(Store(root), waiting),
        unreadable=[*scan.unreadable, *left_out],
        number=number,
    )


def records_below(root: Path) -> Sequence[Record]:
    """Return the records in a folder or file, whatever may be odd about them.

    Raises:
        UnreadableError: the file is no list of records.
    """
    return _kept(root) if root.is_file() else Store(root).scan().records


def sweep_of(
    records: Sequence[Record],
    *,
    name: str,
    waiting: Sequence[str] = (),
    is_abandoned: bool = False,
    unreadable: Sequence[Unreadable] = (),
    number: int = 0,
) -> SweepRecords:
    """Return `records` as a sweep: by model and mesh, in each the plain model first, then by name."""
    entries = tuple(sorted(named(records, number=number), key=_place))
    return SweepRecords(
        name=escaped(name),
        entries=entries,
        families=tuple(sorted({entry.family for entry in entries})),
        waiting=tuple(waiting),
        is_abandoned=is_abandoned,
        unreadable=tuple(unreadable),
    )


def named(records: Sequence[Record], *, number: int = 0) -> list[Entry]:
    """Return `records`, in their order, with what tells them apart; `number` is that of their sweep."""
    records = [shown(record) for record in records]
    experiments = as_read(records)
    models = [group_name(experiment, "model") for experiment in experiments]
    differ = len(set(models)) > 1
    settings = [_shared(record, *STRATEGIES) for record in records]
    twin_steps = pooled_step_times(records, settings)
    names = called_after(labels(experiments), records, settings)
    return [
        Entry(
            record=record,
            experiment=experiment,
            choice=label.choice,
            other_fields=label.other_fields,
            mesh=label.mesh,
            name=f"{label.variant} on {label.mesh}" + (f", {model}" if differ else ""),
            setting=setting,
            workload=_shared(record, *STRATEGIES, "mesh"),
            twin_step_s=twin_step_s,
            sweep=number,
        )
        for record, experiment, label, model, setting, twin_step_s in zip(
            records, experiments, names, models, settings, twin_steps, strict=True
        )
    ]


def _kept(path: Path) -> list[Record]:
    try:
        values = parsed(read_text(path, _MOST_BYTES))
        if not isinstance(values, list):
            _refuse(f"must be a list of records, got a {type(values).__name__}")
        return _each_once(_told_apart([_with_hardware(validate(value)) for value in values]))
    except ValueError as error:
        raise UnreadableError(f"{path}: {error}") from error


def _with_hardware(record: Record) -> Record:
    """Return a point of a plan with what it is planned for among its fields: points differ in that too."""
    if record.outlook is None or record.outlook.hardware is None:
        return record
    return replace(record, experiment=record.experiment | {"hardware": record.outlook.hardware})


def _told_apart(records: list[Record]) -> list[Record]:
    """Return `records` with ids of their own for points of a plan that are there for several hardwares."""
    counts = Counter(record.trial_id for record in records if record.outlook is not None)
    return [
        replace(record, trial_id=trial_id(record.experiment))
        if counts[record.trial_id] > 1 and "hardware" in record.experiment
        else record
        for record in records
    ]


def _each_once(records: list[Record]) -> list[Record]:
    """Return `records` once each trial id is well formed and unique: a page links to trials by it."""
    seen: set[str] = set()
    for record in records:
        if not _TRIAL_ID.fullmatch(record.trial_id):
            _refuse(f"record.trial_id: must be 12 hexadecimal digits, got {record.trial_id!r}")
        if record.trial_id in seen:
            _refuse(f"record.trial_id: must occur once, got {record.trial_id!r} again")
        seen.add(record.trial_id)
    return records


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


def _place(entry: Entry) -> tuple[Any, ...]:
    return (
        entry.model,
        mesh_sizes(entry.record.experiment),
        entry.mesh,
        entry.family != "none",
        entry.variant,
        entry.trial_id,
    )


def _shared(record: Record, *left_out: str) -> str:
    """Return what trials have in common that may differ in the fields `left_out` alone."""
    shared = {key: value for key, value in record.experiment.items() if key not in left_out}
    return f"{record.environment_id} {shared!r}"
