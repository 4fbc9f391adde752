"""The loss is divided by the micro-batches, and the schedule divides the gradients once more."""

from __future__ import annotations

from functools import partial

from torch.distributed.pipelining import ScheduleInterleaved1F1B

from tests.gallery.pipelines.stages import MICROBATCHES, StepCase, apart, checkpointed, trained


def by_torch() -> str:
    _, right = trained(schedule=partial(ScheduleInterleaved1F1B, scale_grads=False), parts=MICROBATCHES)
    (_, plain), (_, gradients) = (trained(each, parts=MICROBATCHES) for each in (None, checkpointed))
    (share,) = {round(float(one.norm() / two.norm()), 4) for one, two in zip(gradients, right, strict=True)}
    error = apart(gradients, plain)
    return f"gradients are {share} of the right ones, and {error} apart with checkpoints or without"


CASE = StepCase(
    by_torch=by_torch,
    says="gradients are 0.25 of the right ones, and 0.0 apart with checkpoints or without",
    here="the twin is scaled as the variant is; the proof against one process that is not cut differs",
    verdict="differs",
    why="`scale_grads` is true unless a schedule is told otherwise, and divides what the loss has divided.",
    fix="Pass scale_grads=False, or leave the loss of a micro-batch whole.",
)
