"""Regions in regions around 64 equal blocks: what is kept, and what is recomputed for it.

r levels of 64^(1/r) regions keep 64^(1/r) block inputs after forward, and at the peak of backward as
many of each level: of 64 blocks 64, then twice 8, thrice 4, six times 2, which is O(N), O(sqrt N), ...,
O(log N). They cost r more forwards, with early stop less. Kept bytes, and without early stop FLOPs and
calls, follow from the levels exactly, and are checked; every row trains beside its twin for three steps,
with dropout.

Each outermost region also keeps the state of the CPU's generator, in host memory also where the model is on a
GPU.

Times are those of 16 blocks beside `ac=full` in the same process. The target is 1.0 at one level, and at two
1.15 x the ratio of FLOPs.

    python -m bench.nested
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from rich.console import Group
from rich.table import Table

from bench.output import parser, publish, status_of
from bench.overhead.steps import time_ratio
from bench.table import table_of
from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.measure.parity.compare import compare_steps
from harness.measure.parity.snapshot import steps
from harness.measure.step import instrument
from harness.models.base import Batch
from harness.records.statistics import Ratio
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.steps import train

BLOCKS, WIDTH, BATCH_SIZE, SEQUENCE_LENGTH = 64, 64, 8, 128
SIZES = (
    "model=mlp",
    f"model.n_layers={BLOCKS}",
    f"model.width={WIDTH}",
    f"model.hidden_width={WIDTH}",
    "model.vocab_size=16",  # logits as small as they can be: the blocks are what is looked at
    "model.dropout=0.1",
    "data=synthetic",
    f"batch_size={BATCH_SIZE}",
    f"sequence_length={SEQUENCE_LENGTH}",
)
BLOCK_INPUT_BYTES = 4 * BATCH_SIZE * SEQUENCE_LENGTH * WIDTH
BLOCKS_FLOPS = BLOCKS * 2 * (2 * BATCH_SIZE * SEQUENCE_LENGTH * WIDTH * WIDTH)
LEVELS = ((64,), (8, 8), (4, 4, 4), (2, 2, 2, 2, 2, 2))
_CPU = torch.device("cpu")
TIMED_BLOCKS, TIMED_LEVELS, TIMED_WIDTHS = 16, ((16,), (4, 4)), (64, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class NestedStep:
    """One step.

    Fields:
        levels: regions by level; empty for `ac=none`.
        early_stop: whether recomputations end at the last tensor that is needed.
        saved_bytes: kept after forward.
        rng_bytes: of these the states of the generator, one for each outermost region.
        activation_peak_bytes: highest total of what the step made, gradients of parameters left out.
        recomputed_flops: of operators of forward that ran in backward.
        most_calls: forward calls of the block that had the most.
        difference: the first one to the twin in three steps; `None` where all is equal bit for bit.
    """

    levels: tuple[int, ...]
    early_stop: bool
    saved_bytes: int
    rng_bytes: int
    activation_peak_bytes: int
    recomputed_flops: int
    most_calls: int
    difference: str | None


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


def main() -> int:
    """Measure, print the table, write the JSON; return 1 where a number is not the one that follows."""
    made = parser(__doc__, "nested")
    made.add_argument("--pairs", type=int, default=20, help="steps of each kind that are timed")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    chosen = [((), True), *((levels, early_stop) for levels in LEVELS for early_stop in (False, True))]
    overrides = [
        [
            *SIZES,
            *(
                ["ac=nested", f"ac.levels=[{','.join(map(str, levels))}]", f"ac.early_stop={early_stop}"]
                if levels
                else ["ac=none"]
            ),
        ]
        for levels, early_stop in chosen
    ]
    rows = [
        _measure(*each, experiment) for each, experiment in zip(chosen, experiments(overrides), strict=True)
    ]
    times = [
        _time(width, levels, arguments.pairs, rewind=rewind)
        for width in TIMED_WIDTHS
        for levels in TIMED_LEVELS
        for rewind in (False, True)
    ]
    publish(
        Group(_table(rows), _table_of_times(times)),
        arguments.out,
        protocol={
            "overrides": SIZES,
            "parity_steps": 3,
            "block_input_bytes": BLOCK_INPUT_BYTES,
            "blocks_flops": BLOCKS_FLOPS,
            "pairs": arguments.pairs,
        },
        results={"steps": rows, "times": times},
    )
    return status_of([row for row in rows if not is_as_claimed(row, rows)])


def is_as_claimed(row: NestedStep, rows: list[NestedStep]) -> bool:
    """Whether `row` is neutral and, where it follows from its levels, exact."""
    if row.difference is not None:
        return False
    if not row.levels or row.early_stop:
        return True
    flat = next(each for each in rows if each.levels == LEVELS[0] and not each.early_stop)
    depth = len(row.levels)
    kept, kept_flat = row.saved_bytes - row.rng_bytes, flat.saved_bytes - flat.rng_bytes
    return (
        kept_flat - kept == (flat.levels[0] - row.levels[0]) * BLOCK_INPUT_BYTES
        and row.recomputed_flops == depth * BLOCKS_FLOPS
        and row.most_calls == 1 + depth
    )


def _measure(levels: tuple[int, ...], early_stop: bool, experiment: Experiment) -> NestedStep:
    given = [*map(batches(experiment, _CPU, 0), range(experiment.protocol.parity_steps))]
    trainee = _assembled(experiment, given[0])
    for batch in given:
        train(trainee, batch)
    report = instrument(trainee, given[0])
    return NestedStep(
        levels=levels,
        early_stop=early_stop,
        saved_bytes=report.memory.saved_bytes,
        rng_bytes=(levels[0] if levels else 0) * torch.get_rng_state().nbytes,
        activation_peak_bytes=report.memory.activation_peak_bytes,
        recomputed_flops=report.work.recomputed_flops,
        most_calls=max(report.work.calls.values()),
        difference=_difference(experiment, given),
    )


def _difference(experiment: Experiment, given: list[Batch]) -> str | None:
    expected, actual = (
        steps(_assembled(each, given[0]), given, seed=each.seed, dp_rank=0)
        for each in (experiment.twin(), experiment)
    )
    first = compare_steps(expected, actual, count=len(given), rank=0).first
    return None if first is None else str(first)


def _assembled(experiment: Experiment, batch: Batch) -> Assembled:
    return assemble(experiment, _CPU, None, batch)


def _time(width: int, levels: tuple[int, ...], pairs: int, *, rewind: bool) -> NestedTime:
    common = [*SIZES, f"model.n_layers={TIMED_BLOCKS}", f"model.width={width}", f"model.hidden_width={width}"]
    given = f"ac.levels=[{','.join(map(str, levels))}]"
    nested, full = experiments([[*common, "ac=nested", given, f"ac.rewind={rewind}"], [*common, "ac=full"]])
    batch = batches(full, _CPU, 0)(0)
    of_nested, of_full = (instrument(_assembled(each, batch), batch).work for each in (nested, full))
    return NestedTime(
        width=width,
        levels=levels,
        rewind=rewind,
        ratio=time_ratio(nested, full, batch, pairs),
        flops_ratio=of_nested.step_flops / of_full.step_flops,
    )


def _table(rows: list[NestedStep]) -> Table:
    def inputs(count: int) -> str:
        return f"{count / BLOCK_INPUT_BYTES:.1f} x"

    return table_of(
        rows,
        {
            "levels": lambda row: str(list(row.levels)) if row.levels else "none",
            "parity": lambda row: row.difference or "bitwise",
            "early stop": lambda row: "on" if row.early_stop else "off",
            "saved bytes": "saved_bytes:,",
            "without RNG": lambda row: inputs(row.saved_bytes - row.rng_bytes),
            "activation peak": lambda row: (
                f"{row.activation_peak_bytes:,} = {inputs(row.activation_peak_bytes)}"
            ),
            "recomputed FLOPs": "recomputed_flops:,",
            "in forwards": lambda row: f"{row.recomputed_flops / BLOCKS_FLOPS:.2f}",
            "calls": "most_calls",
        },
        title=f"{BLOCKS} equal blocks, {BLOCK_INPUT_BYTES:,} bytes of input each; x: in inputs of a block",
    )


def _table_of_times(rows: list[NestedTime]) -> Table:
    return table_of(
        rows,
        {
            "width": "width",
            "levels": lambda row: str(list(row.levels)),
            "rewind": lambda row: "on" if row.rewind else "off",
            "time / ac=full": "ratio:3",
            "FLOPs / ac=full": "flops_ratio:.3f",
            "time by FLOPs": lambda row: f"{row.ratio.median / row.flops_ratio:.3f}",
        },
        title="16 blocks beside ac=full, CPU time, A B B A",
    )


if __name__ == "__main__":
    sys.exit(main())
