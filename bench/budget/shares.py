"""Plans of `ac=budget` against their bound: what recomputation costs at each share of the no-AC peak.

Each step is captured once, on tensors without memory, and planned for all shares. `points` is what the plan
costs above the bound, in points of a step's FLOPs. Nothing of this is run.

Then the smallest peak that a plan reaches is run beside `ac=full`: of blocks alone, with all the host memory
that it likes, and with loops over chunks (`chunk=budget`), too. Measured peak, and CPU time of a step as a
ratio to that of `ac=full`, A B B A.

`--plan-only` leaves that out, for models that do not fit here.

With a compiler the compiled executor plans, on the joint graphs of a step that it runs; `ac=full` is compiled
too.

    python -m bench.budget [--models llama_nano …] [--overrides model.n_layers=8 …] [--compiler aot_eager]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Group

from bench.output import parser, publish
from bench.overhead.steps import time_ratio
from bench.table import Column, table_of
from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.measure.step import StepReport, instrument, runnable_step
from harness.models.base import Batch
from harness.predict.without_data import as_with_values
from harness.records.statistics import Ratio
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.plain_model import PlainModel
from harness.trial.plan_budget import beside_recomputation, carrying_out
from harness.trial.planned_step import planned_step
from harness.trial.steps import train
from strategies.ac.budget import Budget
from strategies.budget.compiled import compiled_planning
from strategies.budget.plan import Plan
from strategies.budget.planning.chunked_planning import ChunkedPlanner, Way
from strategies.budget.planning.planner import BudgetBelowMinimum, Planner
from strategies.chunk.base import FromPlan
from strategies.chunk.budget import Budget as ChunkBudget
from strategies.step.plan_capture import capture
from strategies.step.step_graph import StepGraph
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
        autograd_percent: cost that no schedule is below that leaves backward to autograd.
        points: the plan's cost above the bound of any schedule.
        seconds: planning and certificate of this budget.
    """

    model: str
    share: float
    peak: float | None = None
    used: float | None = None
    extra_percent: float | None = None
    bound_percent: float | None = None
    autograd_percent: float | None = None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Smallest:
    """The smallest peak of one model, measured; shares are of the measured no-AC peak.

    Fields:
        model: name of the model.
        variant: `full`, `budget`; `host`: with all the host memory that it likes; `chunks`: with loops, too.
        peak: measured peak.
        to_full: the same as a share of that of `ac=full`.
        is_predicted: whether it is the predicted one to the byte; `None` of `ac=full`.
        host: measured highest total on the host.
        extra_percent: FLOPs of a step above those without AC.
        time: CPU time of a step beside that of `ac=full`; `None` of `ac=full` itself.
    """

    model: str
    variant: str
    peak: float
    to_full: float
    is_predicted: bool | None
    host: float
    extra_percent: float
    time: Ratio | None


def captured(experiment: Experiment) -> StepGraph:
    """Return the graph of the second step of `experiment`, without its AC, on one rank."""
    device = torch.device("cpu")
    fakes = Fakes(allow_non_fake_inputs=True)
    batch = batches(experiment, device, dp_rank=0)(0).changed(fakes.from_tensor)
    with as_with_data(), as_with_values(), fakes:
        trainee = assemble(experiment, device, None, batch)
        step = partial(train, trainee, batch)
        step()
        modules = _budget(experiment).modules_of(trainee.model)
        return capture(step, modules, device=device, standing=trainee.model.parameters())


def _budget(experiment: Experiment) -> Budget:
    """Return `ac=budget` of the blocks of an experiment."""
    return Budget(layers_fqn=experiment.model.layers_fqn, fraction=1.0)


def in_chunks(experiment: Experiment) -> list[tuple[Mapping[str, Any], StepGraph]]:
    """Return the same step in chunks of each plan that is offered, without its AC, with that plan."""
    device = torch.device("cpu")
    beside = replace(experiment, ac=_budget(experiment))
    sample = batches(experiment, device, dp_rank=0)(0)
    plain = PlainModel.of(experiment, device)
    step = planned_step(beside_recomputation(beside), plain, sample, device)
    found = []
    with TemporaryDirectory() as folder:
        for number, offer in enumerate(ChunkBudget().offers(plain.model, sample.inputs, step)):
            file = Path(folder, f"{number}.json")
            file.write_text(json.dumps({"chunk": offer}), encoding="utf-8")
            chunked = replace(experiment, chunk=FromPlan(plan_file=str(file)))
            found.append((offer, captured(chunked)))
    return found


def captured_compiled(experiment: Experiment, compiler: str) -> tuple[StepGraph, Callable[[Plan], Plan]]:
    """Return the same for blocks that are compiled, and what makes its plans those of the compiler."""
    device = torch.device("cpu")
    batch = batches(experiment, device, dp_rank=0)(0)
    trainee = assemble(experiment, device, None, batch)
    instrument(trainee, batch)
    step = replace(runnable_step(trainee, batch), compiler=compiler)
    return compiled_planning.captured(step, _budget(experiment).modules_of(trainee.model))


def main(words: Sequence[str]) -> int:
    """Plan all models and budgets, print, write the JSON; return 1 where a plan breaks a promise."""
    arguments = _arguments(words)
    prepared: list[Prepared] = []
    planned: list[Planned] = []
    smallest: list[Smallest] = []
    for model in arguments.models:
        torch.compiler.reset()
        (experiment,) = experiments([[f"model={model}", "ac=none", *arguments.overrides]])
        start = time.perf_counter()
        is_eager = arguments.compiler == "none"
        if is_eager:
            graph, of_executor = captured(experiment), lambda plan: plan
        else:
            graph, of_executor = captured_compiled(experiment, arguments.compiler)
        middle = time.perf_counter()
        planner = Planner(graph, nests=is_eager, is_taped=is_eager)
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
        if not arguments.plan_only:
            plans = {
                name: of_executor(each.plan(each.minimum_feasible_bytes))
                for name, each in _planners(experiment, planner, graph, arguments.compiler).items()
            }
            overrides = (*arguments.overrides, f"compile={arguments.compiler}")
            smallest += _smallest(model, overrides, plans, arguments.pairs)
    tables = (
        table_of(planned, _COLUMNS, title=_title(prepared)),
        table_of(smallest, _SMALLEST_COLUMNS, title="The smallest peak, beside ac=full"),
    )
    publish(
        Group(*tables),
        arguments.out,
        protocol={
            "overrides": arguments.overrides,
            "models": arguments.models,
            "compiler": arguments.compiler,
        },
        results={"prepared": prepared, "planned": planned, "smallest": smallest},
    )
    is_broken = any(each.used is not None and (each.used > 1 or (each.points or 0) < 0) for each in planned)
    return int(is_broken or any(each.is_predicted is False for each in smallest))


def _planners(
    experiment: Experiment, planner: Planner, graph: StepGraph, compiler: str
) -> dict[str, Planner | ChunkedPlanner]:
    """Return what plans the smallest peaks: of blocks alone, and where nothing is compiled of all else."""
    if compiler != "none":
        return {"budget": planner}
    ways = [(None, graph), *in_chunks(experiment)]
    plain = planner.plain_peak_bytes
    return {
        "budget": planner,
        "budget, host": Planner(graph, host_bytes=plain),
        "budget, chunks": _chunked(ways, 0),
        "budget, host, chunks": _chunked(ways, plain),
    }


def _chunked(ways: Sequence[tuple[Mapping[str, Any] | None, StepGraph]], host_bytes: int) -> ChunkedPlanner:
    return ChunkedPlanner(
        [Way(planner=Planner(graph, host_bytes=host_bytes), chunk=offer) for offer, graph in ways]
    )


_COLUMNS = {
    "model": "model",
    "budget": "share:.2f",
    "peak": "peak:.4f",
    "used": "used:.1%",
    "extra FLOPs %": "extra_percent:.2f",
    "bound %": "bound_percent:.2f",
    "autograd %": "autograd_percent:.2f",
    "points": "points:.2f",
    "s": "seconds:.2f",
}


_SMALLEST_COLUMNS: dict[str, Column] = {
    "model": "model",
    "variant": "variant",
    "peak": "peak:.4f",
    "of ac=full": "to_full:.4f",
    "as predicted": "is_predicted",
    "on the host": "host:.4f",
    "extra FLOPs %": "extra_percent:.2f",
    "time of ac=full": "time:3",
}


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "budget")
    made.add_argument("--models", nargs="+", default=MODELS)
    made.add_argument("--overrides", nargs="*", default=OVERRIDES, help="of all models")
    made.add_argument("--shares", nargs="+", type=float, default=SHARES, help="budgets of the no-AC peak")
    made.add_argument("--compiler", choices=("none", "aot_eager"), default="none", help="of the blocks")
    made.add_argument("--plan-only", action="store_true", help="run nothing, for models that do not fit here")
    made.add_argument("--pairs", type=int, default=12, help="of steps that are timed")
    return made.parse_args(words)


def _planned(model: str, planner: Planner, shares: Sequence[float]) -> Iterator[Planned]:
    for share in shares:
        start, budget = time.perf_counter(), int(share * planner.plain_peak_bytes)
        try:
            plan = planner.plan(budget)
        except BudgetBelowMinimum:
            yield Planned(model=model, share=share, seconds=time.perf_counter() - start)
            continue
        extra, bound = map(plan.percent, (plan.extra_flops, plan.lower_bound_extra_flops))
        yield Planned(
            model=model,
            share=share,
            peak=plan.predicted_peak_bytes / planner.plain_peak_bytes,
            used=plan.predicted_peak_bytes / budget,
            extra_percent=extra,
            bound_percent=bound,
            autograd_percent=plan.percent(plan.lower_bound_autograd_flops),
            points=extra - bound,
            seconds=time.perf_counter() - start,
        )


def _smallest(
    model: str, overrides: Sequence[str], plans: Mapping[str, Plan], pairs: int
) -> Iterator[Smallest]:
    """Yield what `ac=full` and `plans` measure."""
    with TemporaryDirectory() as folder:
        points = {"none": ["ac=none"], "full": ["ac=full"]}
        for name, plan in plans.items():
            file = Path(folder, f"{len(points)}.json")
            plan.save(file)
            chunk = "none" if plan.chunk is None else "budget"
            of_plan = ["ac=budget", f"ac.plan_file={file}", f"ac.executor={plan.executor}"]
            points[name] = [*of_plan, f"chunk={chunk}"]
        found = experiments([f"model={model}", *overrides, *point] for point in points.values())
        known = {name: _with_chunks(each) for name, each in zip(points, found, strict=True)}
        batch = batches(known["full"], torch.device("cpu"), dp_rank=0)(0)
        reports = {name: _report(each, batch) for name, each in known.items()}
        for name in ("full", *plans):
            memory, plain, full = reports[name].memory, reports["none"].memory, reports["full"].memory
            plan_bytes = plans[name].predicted_peak_bytes if name in plans else None
            yield Smallest(
                model=model,
                variant=name,
                peak=memory.peak_bytes / plain.peak_bytes,
                to_full=memory.peak_bytes / full.peak_bytes,
                is_predicted=None if plan_bytes is None else memory.peak_bytes == plan_bytes,
                host=memory.host_peak_bytes / plain.peak_bytes,
                extra_percent=100 * (reports[name].work.step_flops / reports["none"].work.step_flops - 1),
                time=None if name == "full" else time_ratio(known[name], known["full"], batch, pairs),
            )


def _with_chunks(experiment: Experiment) -> Experiment:
    """Return an experiment with the chunks of its plan, if it has any."""
    planner = experiment.ac.step_planner
    file = None if planner is None else planner.plan_file
    return experiment if file is None else carrying_out(experiment, Path(file))


def _report(experiment: Experiment, batch: Batch) -> StepReport:
    """Return what the second step shows."""
    trainee = assemble(experiment, torch.device("cpu"), None, batch)
    instrument(trainee, batch)
    return instrument(trainee, batch)


def _title(prepared: Sequence[Prepared]) -> str:
    return "\n".join(
        f"{each.model}: capture {each.capture_s:.1f} s, options {each.options_s:.1f} s, smallest peak "
        f"{each.smallest:.3f} of no AC, proven {each.proven:.3f}"
        for each in prepared
    )
