"""What the probes cost beside the parity steps that they accompany, in one run of each model.

python -m bench.instrumentation --part probes --models gpt_nano llama_nano
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from harness.measure.probes.probing import Probing
from harness.trial.asking import TrialModels, first_link
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.proof import Prover

MODELS = ("mlp", "gpt_nano", "llama_nano", "moe_nano", "vit_nano")
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds of one model under one variant, the shortest of several rounds.

    Fields:
        parity_s: the steps of variant and twin, with building both.
        values_s: the probe of recomputed values.
        probes_s: all other probes, by name.
    """

    model: str
    variant: str
    parity_s: float
    values_s: float
    probes_s: dict[str, float]

    @property
    def ratio(self) -> float:
        """All probes, as a multiple of the parity steps."""
        return (self.values_s + sum(self.probes_s.values())) / self.parity_s


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write the JSON."""
    made = parser(__doc__, "probes", "instrumentation")
    made.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    made.add_argument("--variant", default="full")
    arguments = made.parse_args(words)
    torch.set_num_threads(1)
    costs = [_cost(model, arguments.variant) for model in arguments.models]
    rows = [asdict(cost) | {"ratio": cost.ratio} for cost in costs]
    table = table_of(
        costs,
        {
            "model": "model",
            "ac": "variant",
            "parity steps": "parity_s:.3f",
            "recomputed values": "values_s:.3f",
            "others": lambda cost: ", ".join(f"{name} {taken:.3f}" for name, taken in cost.probes_s.items()),
            "ratio": lambda cost: f"{cost.ratio:.2f}",
        },
        title="seconds of protocol=parity; the ratio of all probes to the parity steps",
    )
    publish(table, arguments.out, protocol={"variant": arguments.variant}, results=rows)
    return 0


def _cost(model: str, variant: str) -> Cost:
    overrides = [f"model={model}", f"ac={variant}", "protocol=parity", "mesh.device=cpu", "batch_size=8"]
    (experiment,) = experiments([[*overrides, *([] if model == "vit_nano" else ["data=synthetic"])]])
    cpu = torch.device("cpu")
    batch = batches(experiment, cpu, 0)

    def assembled(each: Any) -> Any:
        return assemble(each, cpu, None, batch(0))

    link = first_link(experiment)
    prover = Prover(assembled=assembled, batch=batch, rank=0, dp_rank=0)
    models = TrialModels(
        link=link, assembled=assembled, batch=batch, device=cpu, rank=0, dp_rank=0, earliest=lambda step: step
    )
    probing = Probing(source=models)
    return Cost(
        model=model,
        variant=variant,
        parity_s=_seconds(lambda: prover.compare(link)),
        values_s=_seconds(probing.values),
        probes_s={name: _seconds(partial(probing.ask, (name,))) for name in probing.probes()}
        | {"late_reads": _seconds(probing.late_reads)},
    )


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of `run`, the shortest of several rounds."""
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return round(min(taken), 4)
