"""Under a backward in two parts torch recomputes a block for each group of parameters."""

from __future__ import annotations

from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

from tests.gallery.pipelines.stages import MICROBATCHES, StepCase, apart, checkpointed, trained


def by_torch() -> str:
    _, expected = trained(schedule=ScheduleInterleavedZeroBubble)
    (_, block), gradients = trained(checkpointed, schedule=ScheduleInterleavedZeroBubble)
    again = block.forwards / MICROBATCHES - 1
    error = apart(gradients, expected)
    return f"a block runs {again:g} times again for a micro-batch, and gradients are {error} apart"


CASE = StepCase(
    by_torch=by_torch,
    says="a block runs 10 times again for a micro-batch, and gradients are 0.0 apart",
    here="`ac=full` runs it once again; `ac.split_backward=torch` is torch's form, with a note in its record",
    verdict="known bad",
    why="Each group's gradients are a call of `autograd.grad`, and each call is a recomputation of its own.",
    fix="Keep what the input part has recomputed for the weight part.",
    link="https://github.com/pytorch/torchtitan/issues/773",
)
