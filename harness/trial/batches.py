"""The batches of a trial: which samples a rank trains on at each step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.experiment.data import empty_source, source_of
from harness.experiment.experiment import Experiment
from harness.models.base import Batch, joined


def batches(
    experiment: Experiment, device: torch.device, dp_rank: int, *, is_empty: bool = False
) -> Callable[[int], Batch]:
    """Return a function from the step number to a rank's share of the batch: each call returns a new copy.

    Where a step takes several micro-batches, the share is cut into as many, each in memory of its own.

    Args:
        experiment: has model, data, mesh and micro-batches.
        dp_rank: `Mesh.data_rank` of the rank; tensor-parallel peers read the same, and context-parallel ones
            another part of the same sequences.
        is_empty: read no data and give tensors on the meta device, so that neither they nor the model
            take memory; the one batch that a model brings itself is no copy then.
    """
    model, ranks = experiment.model, experiment.mesh.dp
    dp_rank, part = divmod(dp_rank, experiment.mesh.cp)
    fixed = model.fixed_batch(experiment.seed, "meta" if is_empty else device.type)
    if fixed is not None:
        share = _cut(experiment, fixed.share(dp_rank, ranks) if model.splits_fixed_batch() else fixed, 0)
        return lambda _step: share if is_empty else share.to(device)
    length = experiment.sequence_length
    source = (
        empty_source(model, sequence_length=length)
        if is_empty
        else source_of(model, experiment.data, sequence_length=length)
    )

    def batch(step: int) -> Batch:
        """Return rows of the global batch."""
        share = source.batch(
            step=step,
            batch_size=experiment.batch_size,
            seed=experiment.seed,
            dp_rank=dp_rank,
            dp_size=ranks,
        )
        cut = _cut(experiment, share, part)
        return cut if is_empty else cut.to(device)

    return batch


def _cut(experiment: Experiment, share: Batch, part: int) -> Batch:
    """Return a rank's share as the micro-batches of a step, of each a part of the sequences."""
    count, parts = experiment.microbatches, experiment.mesh.cp
    cuts = [share] if count == 1 else [share.share(number, count) for number in range(count)]
    if parts > 1:
        cuts = [experiment.model.sequence_part(each, part, parts) for each in cuts]
    return cuts[0] if count == 1 else joined(cuts)
