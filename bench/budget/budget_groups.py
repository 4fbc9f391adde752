"""What groups of blocks bring to `ac=budget`: the smallest peak with and without them, and their price.

Each model is captured once and planned twice, with groups and with blocks alone. Two tables: the smallest
peak that each reaches; and the cheapest plan of each at budgets that both keep. Nothing of this is run.

    python -m bench.budget --part budget_groups [--models gpt_nano …] [--blocks 8 12 24]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group

from bench.budget.shares import MODELS, captured
from bench.output import parser, publish
from bench.table import Column, table_of
from bench.trials import experiments
from strategies.budget.plan import Plan
from strategies.budget.planning.planner import Planner

_OVERRIDES = ("batch_size=64", "mesh.device=cpu")
_FACTORS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)
"""Budgets that both keep, as multiples of the smallest peak of blocks alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Smallest:
    """The smallest peak that plans of one kind reach; shares are of the no-AC peak.

    Fields:
        model, blocks: name of the model, and how many blocks it has.
        plans: `alone`: of each block apart; `groups`: with groups, too.
        peak: the peak.
        peak_bytes: the same.
        extra_percent, bound_percent: cost of the plan, and cost that no schedule is below, of a step's FLOPs.
        grouped: blocks that are in a group.
        seconds: CPU seconds of options, choice and certificate.
    """

    model: str
    blocks: int
    plans: str
    peak: float
    peak_bytes: int
    extra_percent: float
    bound_percent: float
    grouped: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Both:
    """Costs at one budget that both keep, in percent of a step's FLOPs.

    Fields:
        model, blocks: name of the model, and how many blocks it has.
        share: the budget, of the no-AC peak.
        alone, groups: cost of the cheapest plan of blocks alone, and with groups.
        grouped: blocks that are in a group there.
    """

    model: str
    blocks: int
    share: float
    alone: float
    groups: float
    grouped: int


def main(words: Sequence[str]) -> int:
    """Plan, print, write the JSON."""
    made = parser(__doc__, "budget_groups", "budget")
    made.add_argument("--models", nargs="+", default=MODELS)
    made.add_argument("--blocks", nargs="+", type=int, default=(8, 12, 24))
    made.add_argument("--overrides", nargs="*", default=_OVERRIDES, help="of all models")
    arguments = made.parse_args(words)
    smallest: list[Smallest] = []
    both: list[Both] = []
    for model in arguments.models:
        for blocks in arguments.blocks:
            overrides = (f"model={model}", f"model.n_layers={blocks}", *arguments.overrides)
            (experiment,) = experiments([["ac=none", *overrides]])
            graph = captured(experiment)
            planners = {}
            for name in ("alone", "groups"):
                start = time.process_time()
                planner = planners[name] = Planner(graph, nests=name == "groups")
                plan = planner.plan(planner.minimum_feasible_bytes)
                seconds = time.process_time() - start
                smallest.append(_smallest(plan, model, blocks, name, seconds))
            both += _at_same_budgets(planners, model, blocks)
    tables = [
        table_of(smallest, _SMALLEST_COLUMNS, title="The smallest peak"),
        table_of(both, _BOTH_COLUMNS, title="Budgets that both keep, extra FLOPs %"),
    ]
    publish(
        Group(*tables),
        arguments.out,
        protocol={"overrides": arguments.overrides, "models": arguments.models, "blocks": arguments.blocks},
        results={"smallest": smallest, "both": both},
    )
    return 0


_SMALLEST_COLUMNS: dict[str, Column] = {
    "model": "model",
    "blocks": "blocks",
    "plans": "plans",
    "peak": "peak:.4f",
    "bytes": "peak_bytes:,",
    "extra FLOPs %": "extra_percent:.2f",
    "bound %": "bound_percent:.2f",
    "in groups": "grouped",
    "CPU s": "seconds:.1f",
}

_BOTH_COLUMNS: dict[str, Column] = {
    "model": "model",
    "blocks": "blocks",
    "budget": "share:.4f",
    "alone": "alone:.2f",
    "groups": "groups:.2f",
    "in groups": "grouped",
}


def _smallest(plan: Plan, model: str, blocks: int, plans: str, seconds: float) -> Smallest:
    return Smallest(
        model=model,
        blocks=blocks,
        plans=plans,
        peak=plan.predicted_peak_bytes / plan.plain_peak_bytes,
        peak_bytes=plan.predicted_peak_bytes,
        extra_percent=plan.percent(plan.extra_flops),
        bound_percent=plan.percent(plan.lower_bound_extra_flops),
        grouped=_grouped(plan),
        seconds=seconds,
    )


def _grouped(plan: Plan) -> int:
    return sum(bool(block.group) for block in plan.blocks)


def _at_same_budgets(planners: Mapping[str, Planner], model: str, blocks: int) -> Iterator[Both]:
    """Yield the costs of both at budgets from the smallest of blocks alone on."""
    for factor in _FACTORS:
        budget = int(factor * planners["alone"].minimum_feasible_bytes)
        alone, groups = planners["alone"].plan(budget), planners["groups"].plan(budget)
        yield Both(
            model=model,
            blocks=blocks,
            share=budget / alone.plain_peak_bytes,
            alone=alone.percent(alone.extra_flops),
            groups=groups.percent(groups.extra_flops),
            grouped=_grouped(groups),
        )
