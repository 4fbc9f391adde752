"""What the harness adds to a training step: its timed steps against a bare training loop.

The bare loop is written out below: the model's own module, `zero_grad`, forward, cross entropy, backward,
AdamW. Both train the same weights on the same batch in one process, in the order A B B A; the ratio is that
of the trial's own statistics. A bare loop against another one shows the noise floor, and a step under the
meters what instrumenting costs.

On CPU the steps run on one thread and are timed by the CPU time of the process, which neighbours on a shared
machine hardly move; `--clock wall` takes wall-clock time, as trials do.

    python -m bench.overhead --part steps --pairs 60 --model gpt_nano
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.measure.speed.timing import StepClock, StepFunction, clock_for, interleave
from harness.measure.step import instrument
from harness.models.base import Batch
from harness.records.statistics import Quantiles, Ratio, quantiles, ratio_to_baseline
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.steps import train

TARGET = 0.01
"""How far the median ratio of timed steps may be from 1."""

WARMUP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One kind of step against the bare loop.

    Fields:
        step_time_s, bare_time_s: of the step and of the bare loop.
        ratio: of pairs that were taken side by side.
        target: largest distance of the median from 1; `None` where the row is for information.
    """

    name: str
    step_time_s: Quantiles
    bare_time_s: Quantiles
    ratio: Ratio
    target: float | None


def process_time_s(step: StepFunction) -> float:
    """Return the CPU time of `step` in this process, all its threads together, in seconds."""
    start = time.process_time()
    step()
    return time.process_time() - start


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    arguments = _arguments(words)
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    rows = _rows(arguments, device)
    protocol = {name: value for name, value in vars(arguments).items() if name != "out"} | {"warmup": WARMUP}
    publish(_table(rows), arguments.out, protocol=protocol, results=rows, device=device)
    return 0


def bare_loop(experiment: Experiment, batch: Batch, *, checkpointed: bool) -> StepFunction:
    """Return one step of a training loop that knows nothing of the harness but the model's module.

    Args:
        experiment: its model, seed and learning rate; fp32, one rank, AdamW.
        batch: tokens and targets, (B, S), on the device that computes.
        checkpointed: call every block through torch's `checkpoint`, as one would by hand.
    """
    (tokens,), targets = batch.inputs, batch.targets
    assert targets is not None, "language models have targets"
    torch.manual_seed(experiment.seed)
    with tokens.device:
        model = experiment.model.build().train()
    if checkpointed:
        for block in model.get_submodule(experiment.model.layers_fqn).children():
            region: Any = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = region
    optimizer = torch.optim.AdamW(model.parameters(), lr=experiment.learning_rate)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def harness_step(experiment: Experiment, batch: Batch) -> StepFunction:
    """Return the step that a trial times."""
    return partial(train, assemble(experiment, batch.inputs[0].device, None, batch), batch)


def time_ratio(experiment: Experiment, baseline: Experiment, batch: Batch, pairs: int) -> Ratio:
    """Return the CPU time of a step / that of a baseline's, A B B A."""
    both = harness_step(experiment, batch), harness_step(baseline, batch)
    samples = interleave(*both, warmup=WARMUP, pairs=pairs, clock=process_time_s)
    return ratio_to_baseline(samples.variant_s, samples.twin_s)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "steps", "overhead")
    made.add_argument("--pairs", type=int, default=60)
    made.add_argument("--model", default="gpt_nano")
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--sequence-length", type=int, default=128)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--clock", choices=("process", "wall"), default="process", help="on CPU")
    return made.parse_args(words)


def _rows(arguments: argparse.Namespace, device: torch.device) -> list[Comparison]:
    common = [
        f"model={arguments.model}",
        f"batch_size={arguments.batch_size}",
        f"sequence_length={arguments.sequence_length}",
        f"mesh.device={arguments.device}",
        "data=synthetic",
    ]
    plain, full = experiments([[*common, "ac=none"], [*common, "ac=full", "ac.early_stop=true"]])
    batch = batches(plain, device, 0)(0)
    clock = process_time_s if (arguments.device, arguments.clock) == ("cpu", "process") else clock_for(device)
    compare = partial(_compare, clock=clock, pairs=arguments.pairs)
    bare, by_hand = (bare_loop(plain, batch, checkpointed=checkpointed) for checkpointed in (False, True))
    trainee = assemble(plain, device, None, batch)

    def instrumented() -> None:
        instrument(trainee, batch)

    return [
        compare("bare loop (noise floor)", bare_loop(plain, batch, checkpointed=False), bare),
        compare("ac=none / bare loop", harness_step(plain, batch), bare, target=TARGET),
        compare("ac=full / bare loop with checkpoint()", harness_step(full, batch), by_hand, target=TARGET),
        compare("instrumented step / bare loop", instrumented, bare),
    ]


def _compare(
    name: str,
    step: StepFunction,
    bare: StepFunction,
    *,
    clock: StepClock,
    pairs: int,
    target: float | None = None,
) -> Comparison:
    samples = interleave(step, bare, warmup=WARMUP, pairs=pairs, clock=clock)
    return Comparison(
        name=name,
        step_time_s=quantiles(samples.variant_s),
        bare_time_s=quantiles(samples.twin_s),
        ratio=ratio_to_baseline(samples.variant_s, samples.twin_s),
        target=target,
    )


def _table(rows: list[Comparison]) -> Table:
    return table_of(
        rows,
        {
            "step": "name",
            "median, ms": lambda row: f"{row.step_time_s.median * 1e3:.2f}",
            "bare, ms": lambda row: f"{row.bare_time_s.median * 1e3:.2f}",
            "ratio": "ratio:4",
            "target": lambda row: "-" if row.target is None else f"1 ± {row.target:g}",
        },
        title="Timed steps against a bare training loop, A B B A",
    )
