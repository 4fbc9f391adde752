"""Putting a plan on a model: one region for each block that the plan does not leave as it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from strategies.base import StrategyError
from strategies.budget.group_tape import Group
from strategies.budget.plan import BlockPlan, Plan
from strategies.budget.planned_block import PlannedBlock
from strategies.regions import region
from strategies.regions.blocks import Enclosed
from strategies.regions.host_copies import HostLedger

_VERSION = "torch"


def enclose(plan: Plan, blocks: Mapping[str, nn.Module]) -> None:
    """Put `plan` on `blocks`, in place, and in place of an earlier one.

    Args:
        plan: decides about some of the blocks.
        blocks: plain modules by FQN; those under one module are one.

    Raises:
        StrategyError: the plan names a block that is none, or was made with another torch.
    """
    planned = require_blocks(plan, blocks)
    ledger, groups = HostLedger(), groups_of(plan)
    for fqn, block in planned.items():
        if not block.plain or isinstance(blocks[fqn], Enclosed):
            planned_block = PlannedBlock(
                plan=block,
                ledger=ledger,
                is_for_training=blocks[fqn].training,
                group=groups.get(block.group),
            )
            region.enclose(blocks[fqn], planned_block, holds_call=False)


def groups_of(plan: Plan) -> Mapping[str, Group]:
    """Return the groups of a plan, by the FQN of their first block."""
    members: dict[str, list[str]] = {}
    for block in plan.blocks:
        if block.group:
            members.setdefault(block.group, []).append(block.fqn)
    return {first: Group(fqns) for first, fqns in members.items()}


def require_blocks(plan: Plan, blocks: Mapping[str, nn.Module]) -> Mapping[str, BlockPlan]:
    """Return the plans of blocks by FQN.

    Args:
        plan: decides about some of the blocks.
        blocks: plain modules by FQN.

    Raises:
        StrategyError: the plan names a block that is none, or was made with another torch.
    """
    made_with = plan.versions.get(_VERSION)
    if made_with != torch.__version__:
        problem = (
            f"was made with torch {made_with}, and this is {torch.__version__}, whose operators may differ"
        )
        raise StrategyError("ac.plan_file", f"{problem}; make it again")
    planned: dict[str, BlockPlan] = {block.fqn: block for block in plan.blocks}
    for fqn in planned:
        if fqn not in blocks:
            problem = f"plans {fqn!r}, and the blocks of this model are {', '.join(blocks)}"
            raise StrategyError("ac.plan_file", f"{problem}; use a plan of this model")
    unplanned = next((fqn for fqn in blocks if fqn not in planned and plan.blocks), None)
    if unplanned is not None:
        problem = f"does not plan {unplanned!r}, and the last block it plans is {plan.blocks[-1].fqn!r}"
        raise StrategyError("ac.plan_file", f"{problem}; use a plan of this model")
    return planned
