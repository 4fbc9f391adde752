"""Plans of `ac=budget` between both bounds, on networks of many kinds.

Each step is captured once, on tensors without memory. Budgets lie between the smallest peak that plans of
blocks alone reach, without chains and groups, with 5 % on top, and the plain peak. The first is the smallest
peak of all plans with 5 % on top, where that is lower. `gap` is what the plan costs above the bound of
schedules that leave backward to autograd, in points of a step's FLOPs. The best known plan is the cheapest of
this one and those that the planner finds with two or three blocks as one. Nothing is run. The summary counts
the budgets from that of blocks alone on. The last table has the CPU time of the options of all blocks.

    python -m bench.budget --part gap [--networks funnel …]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group

from bench.budget.shares import captured
from bench.output import parser, publish
from bench.table import Column, table_of
from bench.trials import experiments
from strategies.budget.planning.planner import Planner
from strategies.step.step_graph import StepGraph

_JOINED = ("funnel", "convskip", "outer_products", "cheap_chains", "uneven", "convnext")
"""Networks whose blocks are joined, too: of larger blocks the planner finds worse plans."""

_TOGETHER = (2, 3)
NETWORKS: Mapping[str, Sequence[str]] = {
    **{
        name: ("model=python", f"model.factory=bench.budget.networks:{name}", "model.layers_fqn=blocks")
        for name in (*_JOINED, "cells", "lstm", "scan", "encoder_decoder")
    },
    **{name: (f"model={name}", "batch_size=64") for name in ("gpt_nano", "llama_nano", "vit_nano")},
    "unet": ("model=unet", "model.image_size=32", "batch_size=2"),
    "evoformer": (
        "model=evoformer", "model.msa_width=64", "model.msa_head_width=8", "model.pair_width=32",
        "model.pair_head_width=8", "model.outer_width=8", "model.triangle_width=32", "batch_size=1",
    ),
    "qwen3": (
        "model=hf", "model.config_class=Qwen3Config", "model.layers_fqn=model.layers",
        "model.n_layers=6", "model.width=64", "batch_size=8",
        "model.overrides={intermediate_size: 192, head_dim: 16, num_key_value_heads: 2}",
    ),
}  # fmt: skip
_LEAST = 1.05
_PARTS = (0.0, 0.15, 0.3, 0.5, 0.7)
"""Budgets: parts of the way from the smallest of blocks alone to the plain peak."""

_EQUAL, _NEAR = 1e-4, 1.0
"""Points of a plan at the bound, which is a little below the proven one, and of one near it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan of one network for one budget; shares are of the no-AC peak, costs of a step's FLOPs.

    Fields:
        network: its name.
        share: the budget.
        is_by_blocks: whether plans of blocks alone reach it with 5 % to spare.
        plan_percent, best_percent: cost of the plan, and of the best that is known.
        autograd_percent, any_percent: both bounds.
        gap: points of the plan above the bound of autograd.
    """

    network: str
    share: float
    is_by_blocks: bool
    plan_percent: float
    best_percent: float
    autograd_percent: float
    any_percent: float
    gap: float


def main(words: Sequence[str]) -> int:
    """Plan all networks, print, write the JSON; return 1 where a plan is below a bound."""
    made = parser(__doc__, "gap", "budget")
    made.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    arguments = made.parse_args(words)
    found: list[Planned] = []
    searches: list[Search] = []
    for name in arguments.networks:
        graph = _graph(name)
        start = time.process_time()
        planner = Planner(graph)
        seconds = time.process_time() - start
        by_blocks = Planner(graph, nests=False).minimum_feasible_bytes  # after it: both share options
        searches.append(
            Search(
                network=name,
                smallest_share=planner.minimum_feasible_bytes / planner.plain_peak_bytes,
                by_blocks_share=by_blocks / planner.plain_peak_bytes,
                operators=sum(
                    {graph.fingerprint(call): len(call.operators) for call in graph.calls}.values()
                ),
                seconds=seconds,
            )
        )
        found += _planned(name, planner, by_blocks)
    summary = summary_of(found)
    publish(
        Group(
            table_of(found, _COLUMNS, title="Plans between their bounds"),
            table_of(summary.above, _COLUMNS, title=str(summary)),
            table_of(searches, _SEARCHES, title="Options of all blocks"),
        ),
        arguments.out,
        protocol={"networks": {name: list(NETWORKS[name]) for name in arguments.networks}},
        results={"plans": found, "summary": summary, "searches": searches},
    )
    return int(any(each.gap < 0 for each in found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The budgets that plans of blocks alone reach with 5 % to spare, by the gap of their plans.

    Fields:
        budgets: number of them.
        free, at_bound, near: numbers of plans that cost nothing, of others at the bound, and of others within
            a point of it.
        above: the others.
    """

    budgets: int
    free: int
    at_bound: int
    near: int
    above: tuple[Planned, ...]

    def __str__(self) -> str:
        return (
            f"Of {self.budgets} budgets from that of blocks alone on {self.free} are free, {self.at_bound} "
            f"at the bound, {self.near} within a point, {len(self.above)} above"
        )


def summary_of(found: Sequence[Planned]) -> Summary:
    """Return how many plans are at the bound, and which are not."""
    asked = [each for each in found if each.is_by_blocks]
    free = sum(not each.plan_percent for each in asked)
    at_bound = sum(bool(each.plan_percent) and each.gap <= _EQUAL for each in asked)
    above = tuple(each for each in asked if each.gap > _NEAR)
    near = len(asked) - free - at_bound - len(above)
    return Summary(budgets=len(asked), free=free, at_bound=at_bound, near=near, above=above)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The search for options of all blocks of one network.

    Fields:
        network: its name.
        smallest_share, by_blocks_share: smallest peak of all plans, and of those of blocks alone.
        operators: operators of blocks that differ.
        seconds: CPU time.
    """

    network: str
    smallest_share: float
    by_blocks_share: float
    operators: int
    seconds: float


_SEARCHES: Mapping[str, Column] = {
    "network": "network",
    "smallest": "smallest_share:.3f",
    "of blocks alone": "by_blocks_share:.3f",
    "operators": "operators",
    "CPU s": "seconds:.2f",
    "ms an operator": lambda search: f"{1e3 * search.seconds / search.operators:.1f}",
}
_COLUMNS = {
    "network": "network",
    "budget": "share:.3f",
    "plan %": "plan_percent:.2f",
    "best known %": "best_percent:.2f",
    "autograd %": "autograd_percent:.2f",
    "any order %": "any_percent:.2f",
    "gap": "gap:.2f",
}


def _graph(name: str, *more: str) -> StepGraph:
    (experiment,) = experiments([["ac=none", "mesh.device=cpu", "optimizer=sgd", *NETWORKS[name], *more]])
    return captured(experiment)


def _best_known(name: str) -> list[Planner]:
    """Return planners of the same operators with several blocks as one."""
    if name not in _JOINED:
        return []
    return [Planner(_graph(name, f"model.kwargs={{together: {count}}}")) for count in _TOGETHER]


def _planned(name: str, planner: Planner, by_blocks: int) -> Iterator[Planned]:
    others = _best_known(name)
    plain = planner.plain_peak_bytes
    smallest, asked = (min(_LEAST * least, plain) for least in (planner.minimum_feasible_bytes, by_blocks))
    budgets = [asked + part * (plain - asked) for part in _PARTS]
    for budget in map(int, budgets if smallest >= asked else [smallest, *budgets]):
        plan = planner.plan(budget)
        is_open = plan.extra_flops > plan.lower_bound_autograd_flops * (1 + 1e-6)
        fewest = min(
            (
                each.plan(budget).extra_flops
                for each in (others if is_open else ())  # none is below the bound
                if each.minimum_feasible_bytes <= budget
            ),
            default=plan.extra_flops,
        )
        extra, in_order = map(plan.percent, (plan.extra_flops, plan.lower_bound_autograd_flops))
        yield Planned(
            network=name,
            share=budget / plain,
            is_by_blocks=budget >= int(asked),
            plan_percent=extra,
            best_percent=plan.percent(min(fewest, plan.extra_flops)),
            autograd_percent=in_order,
            any_percent=plan.percent(plan.lower_bound_extra_flops),
            gap=extra - in_order,
        )
