"""Chunk plans as JSON values, for files: what they decide and what they tell, without the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from strategies.base import StrategyError
from strategies.chunk.loops.decisions import decisions_from_json, decisions_to_json
from strategies.chunk.planning.chunk_plan import ChunkPlan
from strategies.chunk.planning.scope_schedules import PlannedRegion, ScopeScheduler
from strategies.chunk.running.chunked_forward import Loss
from strategies.estimate.machine import Machine

_NUMBERS = (
    "budget_bytes",
    "predicted_peak_bytes",
    "unchunked_peak_bytes",
    "minimum_feasible_bytes",
    "predicted_slowdown",
)


def plan_to_json(plan: ChunkPlan) -> dict[str, Any]:
    """Return a plan as JSON values; scopes with equal schedules share one."""
    schedules: list[dict[str, Any]] = []
    scopes: dict[str, int] = {}
    for fqn, scheduler in plan.schedulers.items():
        held = _schedule_to_json(scheduler)
        if held not in schedules:
            schedules.append(held)
        scopes[fqn] = schedules.index(held)
    told = plan.to_dict()
    return {
        "regions": told["regions"],
        "recomputed": told["recomputed"],
        "opaque": told["opaque"],
        "with_loss": told["with_loss"],
        "training": plan.training,
        "alone": {name: told[name] for name in _NUMBERS},
        "schedules": schedules,
        "scopes": scopes,
    }


def plan_from_json(held: Mapping[str, Any], machine: Machine, loss: Loss | None) -> ChunkPlan:
    """Return the plan that `plan_to_json` gave.

    Args:
        machine: device whose time is saved, in forwards that the plan does not know.
        loss: what the model goes on to, where the plan has planned it; `None`: nothing may become part.

    Raises:
        StrategyError: these are no such values, or the plan needs a loss.
    """
    try:
        with_loss = held["with_loss"]
        made = [_schedule_from_json(each, index, machine) for index, each in enumerate(held["schedules"])]
        plan = ChunkPlan(
            **held["alone"],
            training=held["training"],
            regions=tuple(map(_region, held["regions"])),
            recomputed=tuple(held["recomputed"]),
            opaque=held["opaque"],
            schedulers={fqn: made[index] for fqn, index in held["scopes"].items()},
            loss=loss if with_loss else None,
        )
    except (KeyError, TypeError, ValueError, IndexError):
        raise StrategyError("chunk", "the file holds no chunks of this version; make it again") from None
    if with_loss and loss is None:
        problem = (
            "the plan makes the loss part of the model, and this one reads more than outputs and targets"
        )
        raise StrategyError("chunk", f"{problem}; make the plan again for this loss")
    return plan


def _schedule_to_json(scheduler: ScopeScheduler) -> dict[str, Any]:
    return {
        "decisions": {each: decisions_to_json(decided) for each, decided in scheduler.decisions.items()},
        "goal_bytes": scheduler.goal_bytes,
        "share": scheduler.share,
        "recomputes": scheduler.recomputes,
    }


def _schedule_from_json(held: Mapping[str, Any], index: int, machine: Machine) -> ScopeScheduler:
    """Return a schedule; scopes that share it run the same programs, as far as they read the same."""
    return ScopeScheduler(
        decisions={each: decisions_from_json(items) for each, items in held["decisions"].items()},
        goal_bytes=held["goal_bytes"],
        kind=("of a file", index),
        share=held["share"],
        recomputes=held["recomputes"],
        machine=machine,
    )


def _region(held: Mapping[str, Any]) -> PlannedRegion:
    values = {field.name: held[field.name] for field in fields(PlannedRegion)}
    return PlannedRegion(**{**values, "operators": tuple(held["operators"]), "kept": tuple(held["kept"])})
