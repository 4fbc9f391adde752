"""What a step with regions costs beside `ac=full`: CPU time in one process, A B B A, and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.instrumentation.steps import WARMUP, harness_step, process_time_s
from bench.trials import experiments
from harness.experiment.data import source_of
from harness.measure.speed.timing import interleave
from harness.measure.step import instrument
from harness.records.statistics import Ratio, ratio_to_baseline
from harness.trial.assemble import assemble

BLOCKS = 16
LEVELS = (16,), (4, 4)
WIDTHS = 64, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class NestedTime:
    """The time of a step beside that of `ac=full`.

    Fields:
        width: of the blocks and their hidden layers.
        levels: regions by level.
        rewind: whether the state of modules is put back.
        ratio: CPU time of a step.
        flops_ratio: FLOPs of a step, of both kinds.
    """

    width: int
    levels: tuple[int, ...]
    rewind: bool
    ratio: Ratio
    flops_ratio: float


def measured_times(sizes: tuple[str, ...], pairs: int) -> list[NestedTime]:
    """Return a row for each width, level and kind of state.

    Args:
        sizes: overrides of the model, where width and number of blocks are overridden.
        pairs: steps of each kind that are timed.
    """
    return [
        _measured(sizes, width, levels, pairs, rewind=rewind)
        for width in WIDTHS
        for levels in LEVELS
        for rewind in (False, True)
    ]


def _measured(
    sizes: tuple[str, ...], width: int, levels: tuple[int, ...], pairs: int, *, rewind: bool
) -> NestedTime:
    common = [*sizes, f"model.n_layers={BLOCKS}", f"model.width={width}", f"model.hidden_width={width}"]
    given = f"ac.levels=[{','.join(map(str, levels))}]"
    nested, full = experiments([[*common, "ac=nested", given, f"ac.rewind={rewind}"], [*common, "ac=full"]])
    source = source_of(full.model, full.data, sequence_length=full.sequence_length)
    batch = source.batch(step=0, batch_size=full.batch_size, seed=full.seed)
    samples = interleave(
        harness_step(nested, batch),
        harness_step(full, batch),
        warmup=WARMUP,
        pairs=pairs,
        clock=process_time_s,
    )
    flops = []
    for experiment in (nested, full):
        work = instrument(assemble(experiment, torch.device("cpu"), None, batch), batch).work
        flops.append(work.forward_flops + work.backward_flops)
    return NestedTime(
        width=width,
        levels=levels,
        rewind=rewind,
        ratio=ratio_to_baseline(samples.variant_s, samples.twin_s),
        flops_ratio=flops[0] / flops[1],
    )
