"""Plans of `ac=budget` against their bound: what recomputation costs at each share of the no-AC peak.

Each step is captured once, on tensors without memory, and planned for all shares. `points` is what the plan
costs above the bound, in points of a step's FLOPs. Nothing is run.

    python -m bench.budget [--models llama_nano …] [--overrides model.n_layers=8 …]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.predict.without_data import as_with_values
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from strategies.budget.capture import capture
from strategies.budget.planning import BudgetBelowMinimum, Planner
from strategies.budget.step_graph import StepGraph
from strategies.regions.blocks import find_blocks
from strategies.tracing.fakes import Fakes
from strategies.tracing.following import as_with_data

MODELS = ("gpt_nano", "llama_nano", "vit_nano")
OVERRIDES = ("model.n_layers=8", "batch_size=64", "mesh.device=cpu")
SHARES = tuple(share / 100 for share in range(15, 61, 5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan of one model for one budget; shares are of the no-AC peak, costs of a step's FLOPs.

    Fields:
        model: name of the model.
        share: the budget.
        peak: predicted peak; `None` where no plan keeps the budget.
        used: predicted peak as a share of the budget.
        extra_percent, bound_percent: cost of the plan, and cost that no schedule is below.
        points: difference of the two.
        seconds: planning and certificate of this budget.
    """

    model: str
    share: float
    peak: float | None = None
    used: float | None = None
    extra_percent: float | None = None
    bound_percent: float | None = None
    points: float | None = None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What all budgets of one model share.

    Fields:
        model: name of the model.
        capture_s: seconds of the captured step.
        options_s: seconds of the options of all blocks.
        smallest, proven: smallest peak that is reached, and that no schedule is below, as shares.
    """

    model: str
    capture_s: float
    options_s: float
    smallest: float
    proven: float


def captured(experiment: Experiment) -> StepGraph:
    """Return the graph of the second step of `experiment`, without its AC, on one rank."""
    device = torch.device("cpu")
    fakes = Fakes(allow_non_fake_inputs=True)
    batch = batches(experiment, device, dp_rank=0)(0).changed(fakes.from_tensor)
    with as_with_data(), as_with_values(), fakes:
        trainee = assemble(experiment, device, None, batch)

        def step() -> None:
            trainee.zero_grad()
            trainee.backward(trainee.forward(batch)[1])
            trainee.update()

        step()
        blocks = find_blocks(trainee.model, layers_fqn=experiment.model.layers_fqn, module_classes=())
        return capture(step, blocks, device=device, standing=trainee.model.parameters())


def main() -> int:
    """Plan all models and budgets, print, write the JSON; return 1 where a plan breaks a promise."""
    arguments = _arguments()
    prepared: list[Prepared] = []
    planned: list[Planned] = []
    for model in arguments.models:
        (experiment,) = experiments([[f"model={model}", "ac=none", *arguments.overrides]])
        start = time.perf_counter()
        graph = captured(experiment)
        middle = time.perf_counter()
        planner = Planner(graph)
        plain = planner.plain_peak_bytes
        prepared.append(
            Prepared(
                model=model,
                capture_s=middle - start,
                options_s=time.perf_counter() - middle,
                smallest=planner.minimum_feasible_bytes / plain,
                proven=planner.bound.minimum_bytes() / plain,
            )
        )
        planned += _planned(model, planner, arguments.shares)
    publish(
        table_of(planned, _COLUMNS, title=_title(prepared)),
        arguments.out,
        protocol={"overrides": arguments.overrides, "models": arguments.models},
        results={"prepared": list(map(asdict, prepared)), "planned": list(map(asdict, planned))},
    )
    return int(any(map(_is_broken, planned)))


_COLUMNS = {
    "model": "model",
    "budget": "share:.2f",
    "peak": "peak:.4f",
    "used": "used:.1%",
    "extra FLOPs %": "extra_percent:.2f",
    "bound %": "bound_percent:.2f",
    "points": "points:.2f",
    "s": "seconds:.2f",
}


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "budget")
    made.add_argument("--models", nargs="+", default=MODELS)
    made.add_argument("--overrides", nargs="*", default=OVERRIDES, help="of all models")
    made.add_argument("--shares", nargs="+", type=float, default=SHARES, help="budgets of the no-AC peak")
    return made.parse_args()


def _planned(model: str, planner: Planner, shares: Sequence[float]) -> Iterator[Planned]:
    for share in shares:
        start, budget = time.perf_counter(), int(share * planner.plain_peak_bytes)
        try:
            plan = planner.plan(budget)
        except BudgetBelowMinimum:
            yield Planned(model=model, share=share, seconds=time.perf_counter() - start)
            continue
        extra, bound = (
            100 * flops / plan.step_flops for flops in (plan.extra_flops, plan.lower_bound_extra_flops)
        )
        yield Planned(
            model=model,
            share=share,
            peak=plan.predicted_peak_bytes / planner.plain_peak_bytes,
            used=plan.predicted_peak_bytes / budget,
            extra_percent=extra,
            bound_percent=bound,
            points=extra - bound,
            seconds=time.perf_counter() - start,
        )


def _title(prepared: Sequence[Prepared]) -> str:
    return "\n".join(
        f"{each.model}: capture {each.capture_s:.1f} s, options {each.options_s:.1f} s, smallest peak "
        f"{each.smallest:.3f} of no AC, proven {each.proven:.3f}"
        for each in prepared
    )


def _is_broken(planned: Planned) -> bool:
    return planned.used is not None and (planned.used > 1 or (planned.points or 0.0) < 0)


if __name__ == "__main__":
    raise SystemExit(main())
