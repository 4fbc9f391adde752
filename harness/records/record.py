"""The record of a trial: what ran, how it ended, what was measured, what follows from it.

Records are append-only and versioned. Bytes are integers, maxima over ranks unless `by_rank`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records.bound import Bound, contradiction, merge_bounds
from harness.records.fields import decode, encode
from harness.records.measured import RankResult, TrainedModel
from harness.records.merge_ranks import Memory, Time, Work, merge_memory, merge_parity, merge_time, merge_work
from harness.records.parity_result import Parity
from harness.records.predicted_step import Outlook, PredictedStep, assuming
from harness.records.probed import Probed, merge_probed
from harness.records.verdict import VERDICTS, Verdict, verdict

SCHEMA_VERSION = 1
_PREDICTED = "predicted"
_NOTHING_MEASURED: dict[str, Any] = dict.fromkeys(
    ("parity", "memory", "work", "time", "plan", "bound", "unbounded", "trained", "predicted")
)
_NOTHING_SHOWN = Verdict(word="unverified")
RANK_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
"""Sizes of the mesh of an experiment whose product is the number of ranks; those of `ep` are among them."""

STATUSES = ("ok", "oom", "failed", "timeout", "refused", "lost", "predicted")
_FAULTLESS = frozenset({"ok", "predicted"})
_TOLD = {"peak_bytes": "a peak of", "saved_bytes": "that forward saves", "host_peak_bytes": "on the host"}
"""Bytes of which a trial says that they were predicted otherwise, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a trial did not end well.

    Fields:
        kind: exception class, signal name, `exit <code>`, `timeout`, `lost`, `predicted` or
            `Halt.error_kind`.
        message: one sentence, or the text of the exception.
        rank: the culprit; `None` where no rank can be named.
        phase: `build`, `instrument`, `parity` or `timing`; `None` before them.
        log: name of the culprit's log in the trial's folder.
    """

    kind: str
    message: str
    rank: int | None = None
    phase: str | None = None
    log: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The record of one trial; `to_dict` is what stands in `record.json`.

    Fields:
        trial_id: content address of `experiment`.
        environment_id: content address of everything else that decides the numbers.
        started_at, finished_at: ISO 8601 with time zone.
        experiment: resolved; as the user wrote it where it was refused.
        verdict, reason: what the trial has shown, and why that is not `neutral`; no reason where it is, and
            where the trial did not end well.
        plan: what the strategy decided, as rank 0 saw it; `None` for strategies that decide nothing.
        bound: the least that schedules of the step's operators cost at the measured peak; `None` where there
            is none, and in records of earlier versions.
        unbounded: why there is no `bound`, of a variant that was measured beside its twin.
        trained: the model before any strategy; `None` in records of earlier versions, and without numbers.
        note: what a reader should know next to the numbers.
        probes: what was asked beyond the parity steps; `None` where the protocol asks nothing.
        predicted: what was predicted before the trial ran; `None` where nobody has asked.
        outlook: what a plan says of a point that nobody has run; `None` of trials.
        assumes: what a prediction assumes, as `PredictedStep` has it; empty of trials.
    """

    schema_version: int
    trial_id: str
    environment_id: str
    name: str
    started_at: str
    finished_at: str
    experiment: dict[str, Any]
    status: str
    error: Failure | None
    verdict: str
    reason: str | None = None
    parity: Parity | None
    memory: Memory | None
    work: Work | None
    time: Time | None
    plan: dict[str, Any] | None
    environment: dict[str, Any]
    note: str | None = None
    bound: Bound | None = None
    unbounded: str | None = None
    trained: TrainedModel | None = None
    probes: Probed | None = None
    predicted: PredictedStep | None = None
    outlook: Outlook | None = None
    assumes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        encoded: dict[str, Any] = encode(self)
        return encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The fields of a record that are known before the trial runs."""

    trial_id: str
    environment_id: str
    name: str
    experiment: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The end of a trial.

    Fields:
        status: one of `STATUSES`.
        error: `None` exactly when `status` is `ok` or `predicted`.
        started_at, finished_at: ISO 8601 with time zone.
    """

    status: str
    error: Mapping[str, Any] | None
    started_at: str
    finished_at: str


def build(
    identity: Identity,
    ending: Ending,
    rank_results: Sequence[Mapping[str, Any]] = (),
    *,
    environment: Mapping[str, Any] | None = None,
    predicted: PredictedStep | None = None,
    note: str | None = None,
) -> Record:
    """Return the record of a trial that was started.

    A trial whose time was over keeps what all of its ranks had measured. Measurements of one that ended badly
    otherwise are left out: they may lack some of its ranks.

    Args:
        ending: end of the trial, as the agent tells it.
        rank_results: what the ranks wrote, in any order; all of them when the status is `ok`,
            and of a `timeout` what they had measured by then.
        environment: as the driver sees it; rank 0's own description wins where there is one.

    Raises:
        ValueError: a rank result has not the agreed form; the message names rank and path.
    """
    decoded = [decode(RankResult, result, f"rank {result.get('rank')}") for result in rank_results]
    if ending.status not in (*_FAULTLESS, "timeout") or not decoded:
        return _record(identity, ending, environment=dict(environment or {}), note=note)
    ranks = sorted(decoded, key=lambda rank: rank.rank)
    first, is_plain = ranks[0], is_baseline(identity.experiment)
    predicted_peak_bytes = None if predicted is None else predicted.peak_bytes
    memory = merge_memory(ranks, is_plain=is_plain, predicted_peak_bytes=predicted_peak_bytes)
    work, parity = merge_work(ranks, is_plain=is_plain), merge_parity(ranks)
    probed = merge_probed([rank.probes for rank in ranks if rank.probes is not None])
    idle = [rank.observation.unneeded for rank in ranks]  # a plan of one stage may have nothing to do
    unneeded = first.observation.unneeded if all(idle) else None
    promising = ("ac", "chunk") if unneeded is None else ("ac",)
    saves_nothing = _names(identity.experiment, *promising) == {"none"}
    bounds = [rank.bound for rank in ranks if rank.bound is not None]
    bound = merge_bounds(bounds) if bounds and len(bounds) == len(ranks) else None
    below = contradiction(bounds, bound)
    shown = verdict(
        saves_nothing=saves_nothing,
        is_compiled=is_compiled(identity.experiment),
        memory=memory,
        work=work,
        parity=parity,
        probed=probed,
    )
    return _record(
        identity,
        ending,
        shown=shown,
        parity=parity,
        probes=probed,
        memory=memory,
        work=work,
        time=merge_time(ranks, work),
        plan=_plan_of_all([rank.observation.plan for rank in ranks]),
        bound=bound,
        unbounded=first.unbounded if bound is None else None,
        trained=first.trained,
        environment=dict(environment or {}) | _known(first.environment),
        predicted=predicted,
        note="; ".join(
            each for each in (note, unneeded, below, _uncounted(work), *_missed(predicted, memory)) if each
        )
        or None,
    )


def _plan_of_all(plans: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the plan of a trial; where a budget is planned for unlike steps of ranks, that of the highest.

    It then lists the plan of each, too.
    """
    first = plans[0]
    if first is None or "budget_bytes" not in first:
        return first
    unlike: list[dict[str, Any]] = []
    for plan in plans:
        if plan is not None and plan not in unlike:
            unlike.append(plan)
    is_staged = bool(first.get("stages"))
    if len(unlike) == 1 and not is_staged:
        return first
    highest = max(unlike, key=lambda plan: plan["predicted_peak_bytes"])
    return {**highest, "pipeline" if is_staged else "ranks": unlike}


def _uncounted(work: Work) -> str | None:
    """Say which operators have FLOPs that nobody counts, and what part of the step they take at least."""
    operators = work.uncounted_ops
    if not operators:
        return None
    share = sum(each.seconds_share for each in operators.values())
    names = ", ".join(name.removesuffix(".default") for name in operators)
    return f"FLOPs of {names} are not counted: at least {share:.1%} of the step's seconds, by their bytes"


def refused(
    identity: Identity, message: str, *, at: str, environment: Mapping[str, Any] | None = None
) -> Record:
    """Return the record of a point that may not run.

    Args:
        identity: identity of the point; its experiment may be incomplete.
        message: message of the refusal, with configuration path and remedy.
        at: ISO 8601 time of the refusal.
        environment: as the driver sees it.
    """
    error = {"kind": "ConfigError", "message": message}
    ending = Ending(status="refused", error=error, started_at=at, finished_at=at)
    return build(identity, ending, environment=environment)


def predicted_oom(
    identity: Identity, message: str, *, at: str, environment: Mapping[str, Any] | None = None
) -> Record:
    """Return the record of a point that was left unrun because it is predicted not to fit.

    Args:
        at: ISO 8601 time of the decision.
        environment: as the driver sees it.
    """
    error = {"kind": _PREDICTED, "message": message}
    ending = Ending(status="oom", error=error, started_at=at, finished_at=at)
    return build(identity, ending, environment=environment)


def never_ran(record: Record) -> bool:
    """Return whether the trial of a finished record was refused, or left unrun because of a prediction."""
    return record.status == "refused" or (record.error is not None and record.error.kind == _PREDICTED)


def validate(value: object) -> Record:
    """Return the record that a JSON value describes.

    Raises:
        ValueError: it is no record of this version; the message names the path.
    """
    version = value.get("schema_version") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and version != SCHEMA_VERSION:
        raise ValueError(f"record.schema_version: must be {SCHEMA_VERSION}, got {version!r}")
    record = decode(Record, value, "record")
    for name, found, options in (("status", record.status, STATUSES), ("verdict", record.verdict, VERDICTS)):
        if found not in options:
            raise ValueError(f"record.{name}: must be one of {', '.join(options)}, got {found!r}")
    if (record.error is None) != (record.status in _FAULTLESS):
        problem = "record.error: must be null exactly when the status is ok or predicted"
        raise ValueError(f"{problem}, which is {record.status!r}")
    return record


def is_baseline(experiment: Mapping[str, Any]) -> bool:
    """Say if `experiment` has neither AC nor chunks, sharding or compilation; false if it does not say."""
    return _names(experiment, "ac", "chunk", "shard") == {"none"} and not is_compiled(experiment)


def is_compiled(experiment: Mapping[str, Any]) -> bool:
    """Return whether `experiment` compiles its model; records of earlier versions say nothing of it."""
    return bool(experiment.get("compile", "none") != "none")


def _names(experiment: Mapping[str, Any], *groups: str) -> set[Any]:
    """Return what is chosen for `groups`; `None` where the experiment does not say."""
    chosen = (experiment.get(group) for group in groups)
    return {choice.get("name") if isinstance(choice, Mapping) else None for choice in chosen}


def _missed(predicted: PredictedStep | None, memory: Memory) -> Iterator[str]:
    """Yield a sentence for each number of bytes that is not the one that was predicted, and why it may be."""
    if predicted is None:
        return
    for name, words in _TOLD.items():
        expected, measured = getattr(predicted, name), getattr(memory, name)
        if expected != measured and predicted.assumes:
            error = f"{expected / measured - 1:+.2%}" if measured else "of nothing"
            yield f"estimated {words} {expected:,} bytes and measured {measured:,} ({error})"
        elif expected != measured:
            yield f"predicted {words} {expected:,} bytes and measured {measured:,}"
    if predicted.assumes:
        yield assuming(predicted.assumes)


def _known(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank knows of its environment; of foreign processes the driver may know more."""
    return {key: value for key, value in environment.items() if value is not None}


def _record(
    identity: Identity,
    ending: Ending,
    *,
    environment: dict[str, Any],
    note: str | None,
    shown: Verdict = _NOTHING_SHOWN,
    **measured: Any,
) -> Record:
    """Return a record; without `measured` it has no number."""
    return Record(
        schema_version=SCHEMA_VERSION,
        trial_id=identity.trial_id,
        environment_id=identity.environment_id,
        name=identity.name,
        started_at=ending.started_at,
        finished_at=ending.finished_at,
        experiment=identity.experiment,
        status=ending.status,
        error=None if ending.error is None else decode(Failure, ending.error, "error"),
        verdict=shown.word,
        reason=shown.reason,
        environment=environment,
        note=note or None,
        **(_NOTHING_MEASURED | measured),
    )
