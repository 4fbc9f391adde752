"""The bound of a measured variant, from the step of its twin, which was recorded anyway."""

from __future__ import annotations

import math

from harness.experiment.experiment import Experiment, name_of
from harness.measure.step import StepReport
from harness.records.bound import MeasuredBound
from harness.records.measured import RankResult
from strategies.budget.planning.recorded_bound import RecordedStep


def unbounded(experiment: Experiment, *, has_twin: bool) -> str | None:
    """Return why there is no bound for the step of an experiment; `None` where there is one."""
    if name_of(experiment.ac) == "none" and name_of(experiment.chunk) == "none":
        return "no variant of activation checkpointing"
    if name_of(experiment.chunk) != "none":
        return "chunks cut operators, which the bound counts whole"
    if experiment.is_compiled:
        return "compiled code runs other operators than the plain step"
    if experiment.microbatches > 1:
        return "the bound is that of one forward and its backward, and a step of micro-batches has several"
    return None if has_twin else "no twin was measured"


def measured_bound(
    experiment: Experiment, variant: RankResult, twin: RankResult, plain: StepReport
) -> MeasuredBound:
    """Return the bound at the peak of a variant, on this rank.

    Args:
        experiment: the trial.
        variant: what was measured of it, with all that runs again.
        twin: the same of its twin.
        plain: the twin's step.
    """
    peak_bytes, host_peak_bytes = variant.memory.peak_bytes, variant.memory.host_peak_bytes
    again = max(0, variant.work.recomputed_flops - twin.work.recomputed_flops)
    of_any = of_autograd = 0.0  # nothing is below what runs nothing again
    if again:
        step = RecordedStep(
            operators=plain.operators, ledger=plain.ledger, blocks=sum(twin.work.calls.values())
        )
        of_any, of_autograd = step.least_flops(peak_bytes, host_peak_bytes)
    is_ordered = experiment.mesh.world_size == 1
    return MeasuredBound(
        peak_bytes=peak_bytes,
        host_peak_bytes=host_peak_bytes,
        recomputed_flops=again,
        step_flops=twin.work.forward_flops + twin.work.backward_flops,
        lower_bound_extra_flops=_whole(of_any),
        lower_bound_autograd_flops=_whole(of_autograd) if is_ordered else None,
    )


def _whole(flops: float) -> int | None:
    return int(flops) if math.isfinite(flops) else None
