"""Under a backward in two parts torch's selective checkpoint raises."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.gallery.pipelines.stages import StepCase, checkpointed, raised, trained


def by_torch() -> str:
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return raised(
        lambda: trained(partial(checkpointed, context_fn=saved), schedule=ScheduleInterleavedZeroBubble)
    )


CASE = StepCase(
    by_torch=by_torch,
    says="raises Trying to backward an extra time",
    here="`ac=selective_op` runs, bit for bit as its twin; with `ac.split_backward=torch` it is p1",
    verdict="raises",
    why="What is kept is popped by the first recomputation, and the weight part asks for a second one.",
    fix="Keep what the input part has recomputed for the weight part.",
    link="https://github.com/pytorch/pytorch/pull/166536",
)
