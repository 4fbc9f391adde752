"""The bound of a measured variant, from the recorded step of its twin."""

from __future__ import annotations

import math

from harness.experiment.experiment import Experiment, name_of
from harness.records.bound import MeasuredBound
from harness.records.measured import MeasuredMemory, MeasuredWork
from harness.trial.twin_step import TwinStep


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
    memory: MeasuredMemory, work: MeasuredWork, plain: TwinStep, *, is_ordered: bool
) -> MeasuredBound:
    """Return the bound at the peak of a variant, on this rank.

    Args:
        memory, work: what was measured of it, with all that runs again.
        is_ordered: whether the variant runs backward in the twin's order, as on one rank.
    """
    again = max(0, work.recomputed_flops - plain.work.recomputed_flops)
    of_any = of_autograd = 0.0  # nothing is below what runs nothing again
    if again:
        of_any, of_autograd = plain.step.least_flops(memory.peak_bytes, memory.host_peak_bytes)
    return MeasuredBound(
        peak_bytes=memory.peak_bytes,
        host_peak_bytes=memory.host_peak_bytes,
        recomputed_flops=again,
        step_flops=plain.work.step_flops,
        lower_bound_extra_flops=_whole(of_any),
        lower_bound_autograd_flops=_whole(of_autograd) if is_ordered else None,
    )


def _whole(flops: float) -> int | None:
    return int(flops) if math.isfinite(flops) else None
