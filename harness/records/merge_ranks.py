"""Measurements of all ranks of a trial as one: maxima over ranks, the first difference, the slowest step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from harness.records.measured import (
    Allocator,
    MeasuredBaseline,
    MeasuredMemory,
    MeasuredWork,
    MemoryNumbers,
    PeakBytes,
    RankResult,
    Routing,
    StagesInFlight,
    StepFlops,
    UncountedOperator,
)
from harness.records.parity_result import (
    PARTS,
    First,
    Parity,
    PartParity,
    first_of,
    joined,
    merge_parts,
    merge_weightless,
)
from harness.records.statistics import Quantiles, Ratio, quantiles, ratio_to_baseline

_Counts = Mapping[str, int]
_WORK_TOTALS = (
    "forward_flops",
    "backward_flops",
    "recomputed_flops",
    "kernel_recomputed_flops",
    "causal_attention_flops",
)
_TWIN_TOTALS = _WORK_TOTALS[:4]
_TWIN_BYTES = ("saved_bytes", "peak_bytes", "random_state_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory(MemoryNumbers):
    """The bytes of one rank."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPipeline(StagesInFlight):
    """The stages of one rank.

    Fields:
        peak_bytes: highest total on its device during the step, as of `PeakBytes`.
    """

    rank: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRouting(Routing):
    """A router on one rank."""

    rank: int

    @property
    def flip(self) -> str | None:
        """The choices that a recomputation made otherwise than forward, in words; `None` where none."""
        if not self.changed_tokens:
            return None
        tokens = f"{self.changed_tokens} of {self.tokens} tokens"
        where = f"recomputation of {self.router!r} on rank {self.rank}"
        return f"{where} sends {tokens} to other experts than forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineMemory(PeakBytes):
    """The twin's bytes, maximum over ranks. `random_state_bytes`: as of `MemoryNumbers`."""

    random_state_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(MeasuredMemory):
    """The bytes of a trial, maximum over ranks.

    `peak_phase`, `peak_module`, `peak_parts`, `largest_at_peak` and `timeline` are those of the rank with the
    highest peak;
    `largest_saved` and `saved_by_module` those of the rank that saves most. Ties go to the lowest rank.

    Fields:
        pipeline: the ranks of a pipeline, in order; `None` where there is none. `saved_bytes` is then the
            most that lived when a forward of any micro-batch had returned.
    """

    by_rank: tuple[RankMemory, ...]
    pipeline: tuple[RankPipeline, ...] | None = None
    predicted_peak_bytes: int | None = None
    baseline: BaselineMemory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineWork(StepFlops):
    """The twin's FLOPs, maximum over ranks.

    Fields:
        recomputed_flops: what the plain model recomputes by itself, with checkpoints of its own.
        kernel_recomputed_flops: attention scores that backward kernels compute once more.
    """

    recomputed_flops: int = 0
    kernel_recomputed_flops: int = 0

    @property
    def model_flops(self) -> int:
        """FLOPs of the model's mathematics, without what is computed a second time."""
        return self.step_flops - self.recomputed_flops - self.kernel_recomputed_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(MeasuredWork):
    """The work of a trial, maximum over ranks.

    Fields:
        named, never_fired: operators that the save list names; never fired means on no rank.
        routing: routers of experts that ranks share, by rank; empty where ranks share none.
    """

    named: tuple[str, ...] = ()
    never_fired: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    chunks: int = 0
    routing: tuple[RankRouting, ...] = ()
    baseline: BaselineWork | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """Step times in seconds, the slowest rank's at each index."""

    variant: tuple[float, ...]
    twin: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """The speed of a trial.

    Fields:
        ratio_to_baseline: variant / twin; `None` without a twin.
        tokens_per_s: a device, at the median step time.
        job_tokens_per_s: all devices together; `None` in records of earlier versions, and without tokens.
        mfu: FLOPs of the plain model, each computed once, over the device's peak rate, at the median step
            time. Attention counts the whole square, causal or not.
        hfu: the same with everything that is computed a second time.
        energy_j: joules a step, all devices.
    """

    step_time_s: Quantiles
    ratio_to_baseline: Ratio | None
    tokens_per_s: float | None
    mfu: float | None
    hfu: float | None
    peak_flops_per_s_source: str | None
    peak_flops_per_s: float | None = None
    energy_j: float | None = None
    job_tokens_per_s: float | None = None
    samples_s: StepSamples = field(default_factory=lambda: StepSamples(variant=()))


def merge_memory(
    ranks: Sequence[RankResult], *, is_plain: bool, predicted_peak_bytes: int | None = None
) -> Memory:
    """Return the memory of a trial.

    Args:
        is_plain: the trial is its own baseline, so that its numbers are the baseline's where no twin ran.
    """
    memories = [rank.memory for rank in ranks]
    highest = max(memories, key=lambda memory: memory.peak_bytes)
    fullest = max(memories, key=lambda memory: memory.saved_bytes)
    twins = _baselines(ranks, is_plain=is_plain)
    return Memory(
        **_maxima(memories, _byte_fields(MemoryNumbers)),
        peak_phase=highest.peak_phase,
        peak_module=highest.peak_module,
        peak_parts=highest.peak_parts,
        allocator=_merge_allocators([memory.allocator for memory in memories]),
        largest_at_peak=highest.largest_at_peak,
        timeline=highest.timeline,
        largest_saved=fullest.largest_saved,
        saved_by_module=fullest.saved_by_module,
        by_rank=tuple(RankMemory(rank=rank.rank, **_numbers(rank.memory, MemoryNumbers)) for rank in ranks),
        pipeline=tuple(map(_rank_pipeline, ranks)) if all(rank.pipeline for rank in ranks) else None,
        predicted_peak_bytes=predicted_peak_bytes,
        baseline=BaselineMemory(**_maxima([twin.memory for twin in twins], _TWIN_BYTES)) if twins else None,
    )


def merge_work(ranks: Sequence[RankResult], *, is_plain: bool) -> Work:
    """Return the work of a trial; collectives and counts are maxima over ranks, name by name."""
    works = [rank.work for rank in ranks]
    if is_plain:  # what it recomputes, it recomputes by itself
        works = [work.beyond(work) for work in works]
    seen, twins = [rank.observation for rank in ranks], _baselines(ranks, is_plain=is_plain)
    return Work(
        **_maxima(works, _WORK_TOTALS),
        recomputed_ops=_highest(work.recomputed_ops for work in works),
        recomputed_seconds_share=max(work.recomputed_seconds_share for work in works),
        uncounted_ops=_merge_uncounted([work.uncounted_ops for work in works]),
        calls=_highest(work.calls for work in works),
        recomputations=_highest(work.recomputations for work in works),
        collectives=highest_by_phase([work.collectives for work in works]),
        collective_bytes=highest_by_phase([work.collective_bytes for work in works]),
        collectives_repeated=_highest(work.collectives_repeated for work in works),
        acted_otherwise=any(work.acted_otherwise for work in works),
        compiled_graphs=max(work.compiled_graphs for work in works),
        graph_breaks=_highest(work.graph_breaks for work in works),
        policy_answers=_highest(work.policy_answers for work in works),
        named=seen[0].named,
        never_fired=_in_all([each.never_fired for each in seen]),
        **_maxima(seen, ("offloaded_bytes", "chunks")),
        routing=tuple(
            RankRouting(rank=rank.rank, **_numbers(each, Routing)) for rank in ranks for each in rank.routing
        ),
        baseline=BaselineWork(**_maxima([twin.work for twin in twins], _TWIN_TOTALS)) if twins else None,
    )


def _merge_uncounted(ranks: Sequence[Mapping[str, UncountedOperator]]) -> dict[str, UncountedOperator]:
    """Return operators by name, each of the rank of whose step it takes the largest share."""
    merged: dict[str, UncountedOperator] = {}
    for name, each in (item for rank in ranks for item in rank.items()):
        known = merged.get(name)
        if known is None or each.seconds_share > known.seconds_share:
            merged[name] = each
    return dict(sorted(merged.items()))


def _in_all(named: Sequence[Sequence[str]]) -> tuple[str, ...]:
    shared = set(named[0]).intersection(*named)
    return tuple(name for name in named[0] if name in shared)


def merge_parity(ranks: Sequence[RankResult]) -> Parity | None:
    """Return the parity of a trial: equal only where all ranks are; `None` unless all ranks compared."""
    parities = [rank.parity for rank in ranks if rank.parity is not None]
    return merge_parities(parities) if parities and len(parities) == len(ranks) else None


def merge_parities(parities: Sequence[Parity]) -> Parity:
    """Return one comparison for all ranks: the worst of each, the first difference, mean losses."""
    parts = {name: merge_parts([getattr(parity, name) for parity in parities]) for name in PARTS}
    levels = [parity.level for parity in parities]
    controls = [parity.control for parity in parities if parity.control is not None]
    return Parity(
        first=_merge_first(parts, parities),
        level="tolerance" if "tolerance" in levels else levels[0],
        steps=min(parity.steps for parity in parities),
        absent=_in_all([parity.absent for parity in parities]),
        uncompared=joined(parity.uncompared for parity in parities),
        # of each step the mean over the ranks that compute a loss: those of a last stage
        losses=tuple(map(fmean, zip(*filter(None, (each.losses for each in parities)), strict=True))),
        weightless=merge_weightless([parity.weightless for parity in parities]),
        control=merge_parities(controls) if len(controls) == len(parities) else None,
        compared=parities[0].compared,
        chain=tuple(map(merge_parities, zip(*(parity.chain for parity in parities), strict=True))),
        first_module=next(filter(None, (parity.first_module for parity in parities)), ""),
        unreached=parities[0].unreached,
        **parts,
    )


def _merge_first(parts: Mapping[str, PartParity], parities: Sequence[Parity]) -> First | None:
    """Return the first difference in time on any rank; a block differs where it does so on one."""
    blocks: dict[str, bool] = {}
    first = first_of(parts, blocks)
    for other in (parity.first for parity in parities):
        if first is not None and other is not None and (other.step, other.part) == (first.step, first.part):
            blocks |= {name: differs or blocks.get(name, False) for name, differs in other.blocks.items()}
    return first_of(parts, blocks)


def merge_time(ranks: Sequence[RankResult], work: Work) -> Time | None:
    """Return the speed of a trial, a step being as slow as its slowest rank; `None` unless all were timed."""
    times = [rank.time for rank in ranks if rank.time is not None]
    if not times or len(times) < len(ranks) or not times[0].variant_s:
        return None
    samples = StepSamples(
        variant=_slowest([time.variant_s for time in times]), twin=_slowest([time.twin_s for time in times])
    )
    step_time_s = quantiles(samples.variant)
    rates = [time.peak_flops_per_s for time in times if time.peak_flops_per_s is not None]
    tokens, rate = times[0].tokens_per_step, min(rates) if len(rates) == len(times) else None
    of_job = None if tokens is None else tokens / step_time_s.median
    plain = work.baseline
    return Time(
        step_time_s=step_time_s,
        ratio_to_baseline=ratio_to_baseline(samples.variant, samples.twin) if samples.twin else None,
        tokens_per_s=None if of_job is None else of_job / times[0].devices,
        mfu=_utilisation(None if plain is None else plain.model_flops, step_time_s.median, rate),
        hfu=_utilisation(work.step_flops, step_time_s.median, rate),
        peak_flops_per_s_source=times[0].peak_flops_per_s_source,
        peak_flops_per_s=rate,
        energy_j=_total([time.energy_j for time in times]),
        job_tokens_per_s=of_job,
        samples_s=samples,
    )


def _maxima(measured: Sequence[object], names: Iterable[str]) -> dict[str, int]:
    return {name: max(getattr(each, name) for each in measured) for name in names}


def _byte_fields(cls: type[MemoryNumbers | Allocator]) -> list[str]:
    return [field.name for field in fields(cls) if field.name.endswith("_bytes")]


def _numbers(measured: object, cls: type[MemoryNumbers | StagesInFlight | Routing]) -> dict[str, Any]:
    """Return those fields of what a rank has measured that `cls` has."""
    return {field.name: getattr(measured, field.name) for field in fields(cls)}


def _rank_pipeline(rank: RankResult) -> RankPipeline:
    assert rank.pipeline is not None, "all ranks have stages, or none"
    numbers = _numbers(rank.pipeline, StagesInFlight)
    return RankPipeline(rank=rank.rank, peak_bytes=rank.memory.peak_bytes, **numbers)


def _merge_allocators(allocators: Sequence[Allocator | None]) -> Allocator | None:
    """Return the highest numbers of any rank's allocator."""
    known = [allocator for allocator in allocators if allocator is not None]
    if not known:
        return None
    highest = {
        name: max(
            (value for allocator in known if (value := getattr(allocator, name)) is not None), default=None
        )
        for name in _byte_fields(Allocator)
    }
    return Allocator(source=known[0].source, **highest)  # type: ignore[arg-type]  # requested bytes are never None


def _baselines(ranks: Sequence[RankResult], *, is_plain: bool) -> Sequence[MeasuredBaseline]:
    """Return what the twin of each rank measured; nothing where a rank has none."""
    found = [rank.baseline for rank in ranks if rank.baseline is not None]
    if is_plain and not found:
        return [MeasuredBaseline(memory=rank.memory, work=rank.work) for rank in ranks]
    return found if len(found) == len(ranks) else []


def _highest(counts: Iterable[_Counts]) -> dict[str, int]:
    highest: dict[str, int] = {}
    for count in counts:
        for name, value in count.items():
            highest[name] = max(value, highest.get(name, value))
    return highest


def highest_by_phase(phases: Sequence[Mapping[str, _Counts]]) -> dict[str, dict[str, int]]:
    """Return the highest counts of all ranks, by phase and name."""
    names = dict.fromkeys(name for by_phase in phases for name in by_phase)
    return {name: _highest(by_phase.get(name, {}) for by_phase in phases) for name in names}


def _slowest(samples: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(step) for step in zip(*samples, strict=True))


def _utilisation(flops: int | None, step_time_s: float, rate: float | None) -> float | None:
    return None if flops is None or rate is None else flops / step_time_s / rate


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
