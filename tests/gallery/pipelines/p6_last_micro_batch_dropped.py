"""A loop takes as many micro-batches as are full, and the rest of the batch trains nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.gallery.parts import rows
from tests.gallery.pipelines.stages import ROWS, Stage, StepCase, apart, checkpointed


def by_torch() -> str:
    batch = rows(3 * ROWS + 1)[0]
    dropped, checked, whole = (_looped(batch, each) for each in ("", "checkpointed", "whole"))
    with_checkpoints = apart(checked, dropped)
    error = f"{apart(dropped, whole):.1g} apart from the right ones"
    return f"gradients are {error}, and {with_checkpoints} apart with checkpoints or without"


def _looped(batch: Tensor, how: str) -> list[Tensor]:
    torch.manual_seed(0)
    stage = Stage()
    model = checkpointed(stage) if how == "checkpointed" else stage
    count = len(batch) // ROWS  # the rest is left out
    parts = batch.split(ROWS) if how == "whole" else [batch[i * ROWS : (i + 1) * ROWS] for i in range(count)]
    for part in parts:
        (model(part).square().sum() / sum(map(len, parts))).backward()
    return [each.grad for each in stage.parameters() if each.grad is not None]


CASE = StepCase(
    by_torch=by_torch,
    says="gradients are 0.2 apart from the right ones, and 0.0 apart with checkpoints or without",
    here="micro-batches that do not divide a batch are refused; of a step that drops one the outputs differ",
    verdict="refused",
    why="Variant and plain model drop the same rows, so that comparing them shows nothing.",
    fix="Let micro-batches divide the batch, or take one that is smaller and weigh its loss.",
)
