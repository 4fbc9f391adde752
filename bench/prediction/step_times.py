"""How far predicted step times are from measured ones on this CPU, and whether they rank variants rightly.

Every variant of a model trains in this process, in turns, on one thread. What is measured is the CPU time of
a step: work of others on the machine adds nothing to it but what caches and the cores' other threads lose. A
step takes the least of its times; its interval ends at their first quartile. A pair of variants counts for
the order where the intervals do not meet. Predictions are for `hardware=this_cpu`, which
`acbench-calibrate` measures; no number of a model is in it.

    python -m bench.prediction --part step_times --models gpt_nano llama_nano
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import torch
from rich.table import Table

from bench.output import parser, publish
from bench.overhead.steps import harness_step, process_time_s
from bench.table import table_of
from bench.trials import configs, experiments
from harness.command_line.schema import hardware_of
from harness.measure.speed.timing import in_turns
from harness.predict.fake_rank import planned_on_fake_rank
from harness.predict.hardware import Hardware
from harness.predict.prediction import step_of
from harness.predict.step_time import timed_on
from harness.trial.batches import batches
from harness.trial.steps import UNMEASURED_STEPS

MODELS = ("gpt_nano", "llama_nano", "mlp", "vit_nano", "evoformer", "unet")
ACS = ("none", "full", "selective_layer", "selective_op", "nested", "offload", "budget ac.fraction=0.8")
_ON_ONE_RANK = ("data=synthetic", "mesh=single", "optimizer=sgd")
MOST_ERROR, LEAST_ORDERED = 0.15, 0.9
"""Targets: the median error, and the share of pairs in the right order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One variant of one model.

    Fields:
        predicted_s: seconds of a step as predicted.
        measured_s: the least CPU time of its steps.
        quartile_s: the first quartile of them.
    """

    model: str
    ac: str
    predicted_s: float
    measured_s: float
    quartile_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def main(words: Sequence[str]) -> int:
    """Predict, measure, print, write the JSON."""
    made = parser(__doc__, "step_times", "prediction")
    made.add_argument("--models", nargs="+", default=MODELS)
    made.add_argument("--acs", nargs="+", default=ACS)
    made.add_argument("--rounds", type=int, default=15, help="steps of each variant")
    arguments = made.parse_args(words)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    (hardware,) = map(hardware_of, configs([["hardware=this_cpu"]]))
    assert hardware is not None
    found = [
        each
        for model in arguments.models
        for each in step_times(model, arguments.acs, rounds=arguments.rounds, hardware=hardware)
    ]
    error = median(abs(each.error) for each in found)
    right, count = ordered(found)
    publish(
        _table(found),
        arguments.out,
        protocol={"rounds": arguments.rounds, "models": arguments.models, "acs": arguments.acs, "threads": 1},
        results={"median_error": error, "ordered_pairs": right, "pairs": count, "steps": found},
    )
    wanted = f"at most {MOST_ERROR:.0%} and at least {LEAST_ORDERED:.0%} wanted"
    print(f"median error {error:.1%}, order right in {right} of {count} pairs; {wanted}")
    return 0


def step_times(model: str, acs: Sequence[str], *, rounds: int, hardware: Hardware) -> Iterator[StepTime]:
    """Yield the time of each variant of a model, measured in turns."""
    chosen = experiments([f"model={model}", *f"ac={ac}".split(), *_ON_ONE_RANK] for ac in acs)
    device, seconds = torch.device("cpu"), timed_on(hardware)
    with TemporaryDirectory() as folder:
        files = (Path(folder, str(number)) for number in count())
        chosen = list(map(planned_on_fake_rank, chosen, files))
        predicted = [seconds(step_of(each).trace).step_s for each in chosen]
        steps = [harness_step(each, batches(each, device, 0)(0)) for each in chosen]
    times_s = in_turns(steps, warmup=UNMEASURED_STEPS, turns=rounds, clock=process_time_s)
    for ac, expected_s, times in zip(acs, predicted, times_s, strict=True):
        yield StepTime(
            model=model,
            ac=ac,
            predicted_s=expected_s,
            measured_s=min(times),
            quartile_s=quantiles(times, n=4, method="inclusive")[0],
        )


def ordered(found: Sequence[StepTime]) -> tuple[int, int]:
    """Return how many pairs of variants of one model are in the predicted order, and how many can be told."""
    pairs = [
        sorted(pair, key=lambda each: each.measured_s)
        for pair in combinations(found, 2)
        if pair[0].model == pair[1].model
    ]
    apart = [(quick, slow) for quick, slow in pairs if quick.quartile_s < slow.measured_s]
    return sum(quick.predicted_s < slow.predicted_s for quick, slow in apart), len(apart)


def _table(found: Sequence[StepTime]) -> Table:
    return table_of(
        sorted(found, key=lambda each: -abs(each.error)),
        {
            "model": "model",
            "ac": "ac",
            "predicted": lambda row: f"{row.predicted_s * 1e3:.1f} ms",
            "measured": lambda row: f"{row.measured_s * 1e3:.1f} ms",
            "first quartile": lambda row: f"{row.quartile_s * 1e3:.1f} ms",
            "error": "error:+.1%",
        },
        title="Step times on one thread of this CPU, the worst first",
    )
