"""Plans of `ac=budget` between both bounds, on networks of many kinds.

Each step is captured once, on tensors without memory. Budgets lie between the smallest peak that is reached,
with 5 % on top, and the plain peak. `gap` is what the plan costs above the bound of schedules that leave
backward to autograd, in points of a step's FLOPs. Nothing is run.

    python -m bench.budget --part gap [--networks funnel …]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.budget.shares import captured
from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from strategies.budget.planning.planner import Planner

_OWN = "bench.budget.networks"
NETWORKS: Mapping[str, Sequence[str]] = {
    **{
        name: ("model=python", f"model.factory={_OWN}:{name}", "model.layers_fqn=blocks")
        for name in ("funnel", "convskip", "outer_products", "cheap_chains", "uneven")
    },
    **{name: (f"model={name}", "batch_size=64") for name in ("gpt_nano", "llama_nano", "vit_nano")},
}
_LEAST = 1.05
_PARTS = (0.0, 0.15, 0.3, 0.5, 0.7)
"""Budgets: parts of the way from the smallest to the plain peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan of one network for one budget; shares are of the no-AC peak, costs of a step's FLOPs.

    Fields:
        network: its name.
        share: the budget.
        plan_percent, autograd_percent, any_percent: cost of the plan, and both bounds.
        gap: points of the plan above the bound of autograd.
    """

    network: str
    share: float
    plan_percent: float
    autograd_percent: float
    any_percent: float
    gap: float


def main(words: Sequence[str]) -> int:
    """Plan all networks, print, write the JSON; return 1 where a plan is below a bound."""
    made = parser(__doc__, "gap", "budget")
    made.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    arguments = made.parse_args(words)
    found = [each for name in arguments.networks for each in _planned(name)]
    publish(
        table_of(found, _COLUMNS, title="Plans between their bounds"),
        arguments.out,
        protocol={"networks": {name: list(NETWORKS[name]) for name in arguments.networks}},
        results=list(map(asdict, found)),
    )
    return int(any(each.gap < 0 for each in found))


_COLUMNS = {
    "network": "network",
    "budget": "share:.3f",
    "plan %": "plan_percent:.2f",
    "autograd %": "autograd_percent:.2f",
    "any order %": "any_percent:.2f",
    "gap": "gap:.2f",
}


def _planned(name: str) -> Iterator[Planned]:
    (experiment,) = experiments([["ac=none", "mesh.device=cpu", "optimizer=sgd", *NETWORKS[name]]])
    planner = Planner(captured(experiment))
    plain = planner.plain_peak_bytes
    smallest = min(_LEAST * planner.minimum_feasible_bytes, plain)
    for part in _PARTS:
        plan = planner.plan(int(smallest + part * (plain - smallest)))
        extra, in_order, in_any = map(
            plan.percent, (plan.extra_flops, plan.lower_bound_autograd_flops, plan.lower_bound_extra_flops)
        )
        yield Planned(
            network=name,
            share=plan.budget_bytes / plain,
            plan_percent=extra,
            autograd_percent=in_order,
            any_percent=in_any,
            gap=extra - in_order,
        )
