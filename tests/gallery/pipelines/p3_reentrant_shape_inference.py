"""Stages infer their shapes by `autograd.grad`, which reentrant regions refuse."""

from __future__ import annotations

from functools import partial

from tests.gallery.pipelines.stages import StepCase, checkpointed, raised, trained


def by_torch() -> str:
    reentrant = partial(checkpointed, use_reentrant=True)
    given, inferred = (raised(partial(trained, reentrant, is_inferred=each)) for each in (False, True))
    return f"with shapes {given}, without {inferred}"


CASE = StepCase(
    by_torch=by_torch,
    says=(
        "with shapes raises nothing, without raises When use_reentrant=True, torch.utils.checkpoint is "
        "incompatible with .grad() or passing an `inputs` parameter to .backward()"
    ),
    here="shapes are given, so `ac.use_reentrant=true` runs; with a backward in two parts it is refused",
    verdict="refused",
    why="A step before the first one finds the shapes of what stages pass on, with its own backward.",
    fix="Give `input_args` and `output_args` to `PipelineStage`, or set use_reentrant=False.",
    link="https://github.com/NVIDIA-NeMo/Automodel/issues/3257",
)
