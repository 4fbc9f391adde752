"""Putting a plan on a model: one region for each block that the plan does not leave as it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from strategies.base import StrategyError
from strategies.budget.group_tape import Group
from strategies.budget.plan import BlockPlan, Plan
from strategies.budget.planned_block import PlannedBlock, PlannedModule
from strategies.regions import region
from strategies.regions.blocks import Enclosed
from strategies.regions.host_copies import HostLedger

_VERSION = "torch"


def enclose(
    plan: Plan, blocks: Mapping[str, nn.Module], beside: Mapping[str, nn.Module] = MappingProxyType({})
) -> None:
    """Put `plan` on the modules of a model, in place, and in place of an earlier one.

    Args:
        plan: decides about some of the modules.
        blocks: plain modules by FQN; those under one module are one.
        beside: those beside the blocks.

    Raises:
        StrategyError: the plan names a module that is none, or was made with another torch.
    """
    planned = require_blocks(plan, blocks, beside)
    ledger, groups = HostLedger(), groups_of(plan)
    modules = {**beside, **blocks}
    for fqn, block in planned.items():
        shared = PlannedBlock(plan=block, ledger=ledger, group=groups.get(block.group))
        for number, name in enumerate(block.modules or (fqn,)):
            module = modules.pop(name)
            if not block.plain or isinstance(module, Enclosed):
                planned_module = PlannedModule(block=shared, number=number, is_for_training=module.training)
                region.enclose(module, planned_module, holds_call=False)
    for fqn, module in modules.items():
        if isinstance(module, Enclosed):  # by an earlier plan
            plain = PlannedBlock(plan=BlockPlan(fqn=fqn, plain=True), ledger=ledger)
            region.enclose(module, PlannedModule(block=plain), holds_call=False)


def enclose_beside(plan: Plan, blocks: Mapping[str, nn.Module], beside: Mapping[str, nn.Module]) -> None:
    """Put on the modules beside compiled blocks what a plan says of them, in place.

    Args:
        plan, blocks, beside: as of `enclose`; blocks are compiled.

    Raises:
        StrategyError: as of `enclose`.
    """
    planned = require_blocks(plan, blocks, beside)
    ledger, modules = HostLedger(), {**beside, **blocks}
    for block in planned.values():
        shared = PlannedBlock(plan=block, ledger=ledger)
        for number, name in enumerate(block.modules):
            module, is_compiled = modules[name], name in blocks
            planned_module = PlannedModule(
                block=shared, number=number, is_for_training=module.training, is_compiled=is_compiled
            )
            region.enclose(module, planned_module, holds_call=False)


def groups_of(plan: Plan) -> Mapping[str, Group]:
    """Return the groups of a plan, by the FQN of their first block."""
    members: dict[str, list[str]] = {}
    for block in plan.blocks:
        if block.group:
            members.setdefault(block.group, []).append(block.fqn)
    return {first: Group(fqns) for first, fqns in members.items()}


def require_blocks(
    plan: Plan, blocks: Mapping[str, nn.Module], beside: Mapping[str, nn.Module]
) -> Mapping[str, BlockPlan]:
    """Return the plans of blocks, and of modules beside them, by FQN.

    Args:
        plan, blocks, beside: as of `enclose`.

    Raises:
        StrategyError: the plan names a module that is none, or was made with another torch.
    """
    made_with = plan.versions.get(_VERSION)
    if made_with != torch.__version__:
        problem = (
            f"was made with torch {made_with}, and this is {torch.__version__}, whose operators may differ"
        )
        raise StrategyError("ac.plan_file", f"{problem}; make it again")
    planned: dict[str, BlockPlan] = {block.fqn: block for block in plan.blocks}
    for fqn in (name for block in planned.values() for name in block.modules or (block.fqn,)):
        if fqn not in blocks and fqn not in beside:
            problem = f"plans {fqn!r}, and the blocks of this model are {', '.join(blocks)}"
            raise StrategyError("ac.plan_file", f"{problem}; use a plan of this model")
    unplanned = next((fqn for fqn in blocks if fqn not in planned and plan.blocks), None)
    if unplanned is not None:
        problem = f"does not plan {unplanned!r}, and the last block it plans is {plan.blocks[-1].fqn!r}"
        raise StrategyError("ac.plan_file", f"{problem}; use a plan of this model")
    return planned
