"""Plans of `ac=budget` between both bounds, on networks of many kinds.

Each step is captured once, on tensors without memory. Budgets lie between the smallest peak that is reached,
with 5 % on top, and the plain peak. `gap` is what the plan costs above the bound of schedules that leave
backward to autograd, in points of a step's FLOPs. The best known plan is the cheapest of this one and those
that the planner finds with two or three blocks as one. Nothing is run. The second table has the CPU time of
the options of all blocks.

    python -m bench.budget --part gap [--networks funnel …]
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Group

from bench.budget.shares import captured
from bench.output import parser, publish
from bench.table import table_of
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
"""Budgets: parts of the way from the smallest to the plain peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan of one network for one budget; shares are of the no-AC peak, costs of a step's FLOPs.

    Fields:
        network: its name.
        share: the budget.
        plan_percent, best_percent: cost of the plan, and of the best that is known.
        autograd_percent, any_percent: both bounds.
        gap: points of the plan above the bound of autograd.
    """

    network: str
    share: float
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
        searches.append(Search(name, _operators(graph), time.process_time() - start))
        found += _planned(name, planner)
    publish(
        Group(
            table_of(found, _COLUMNS, title="Plans between their bounds"),
            table_of(searches, _SEARCHES, title="Options of all blocks"),
        ),
        arguments.out,
        protocol={"networks": {name: list(NETWORKS[name]) for name in arguments.networks}},
        results={"plans": list(map(asdict, found)), "searches": list(map(asdict, searches))},
    )
    return int(any(each.gap < 0 for each in found))


@dataclass(frozen=True, slots=True)
class Search:
    """The search for options of all blocks of one network.

    Fields:
        network: its name.
        operators: operators of blocks that differ.
        seconds: CPU time.
    """

    network: str
    operators: int
    seconds: float

    @property
    def ms_an_operator(self) -> float:
        """The time that each operator takes."""
        return 1e3 * self.seconds / self.operators


_SEARCHES = {
    "network": "network",
    "operators": "operators",
    "CPU s": "seconds:.2f",
    "ms an operator": "ms_an_operator:.1f",
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


def _planned(name: str, planner: Planner) -> Iterator[Planned]:
    others = _best_known(name)
    plain = planner.plain_peak_bytes
    smallest = min(_LEAST * planner.minimum_feasible_bytes, plain)
    for part in _PARTS:
        budget = int(smallest + part * (plain - smallest))
        plan = planner.plan(budget)
        fewest = min(
            (each.plan(budget).extra_flops for each in others if each.minimum_feasible_bytes <= budget),
            default=plan.extra_flops,
        )
        best, extra, in_order, in_any = map(
            plan.percent,
            (
                min(fewest, plan.extra_flops),
                plan.extra_flops,
                plan.lower_bound_autograd_flops,
                plan.lower_bound_extra_flops,
            ),
        )
        yield Planned(
            network=name,
            share=budget / plain,
            plan_percent=extra,
            best_percent=best,
            autograd_percent=in_order,
            any_percent=in_any,
            gap=extra - in_order,
        )


def _operators(graph: StepGraph) -> int:
    """Return the operators of all blocks that are not as another one."""
    different = {graph.fingerprint(call): len(call.operators) for call in graph.calls}
    return sum(different.values())
