"""Putting a plan on a model: one region for each block that the plan does not leave as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from strategies.base import StrategyError
from strategies.budget.eager.chained_tape import chained
from strategies.budget.eager.group_tape import Group
from strategies.budget.eager.planned_block import PlannedBlock, PlannedCaller, PlannedModule
from strategies.budget.plan import BlockPlan, Plan
from strategies.regions import region
from strategies.regions.blocks import Enclosed, ModelModules
from strategies.regions.host_copies import HostLedger
from strategies.regions.region import Region

_VERSION = "torch"


@runtime_checkable
class HoldsRegion(Protocol):
    """A region around a model that runs another one inside.

    Attributes:
        inner: the other one.
    """

    inner: Region | None


def enclose(plan: Plan, modules: ModelModules) -> None:
    """Put `plan` on the modules of a model, in place, and in place of an earlier one.

    Args:
        plan: decides about some of the modules.
        modules: what it may decide about.

    Raises:
        StrategyError: the plan names a module that is none, or was made with another torch.
    """
    planned = require_blocks(plan, modules)
    ledger, groups = HostLedger(), groups_of(plan)
    rest, callers = modules.all(), {block.caller for block in planned.values()}
    for parts in _calls_of(planned):
        block = chained(parts)
        shared = PlannedBlock(
            plan=block, ledger=ledger, parts=parts if len(parts) > 1 else (), group=groups.get(block.group)
        )
        _put_caller(shared, modules)
        for number, name in enumerate(block.modules or (block.fqn,)):
            module = rest.pop(name)
            if not block.plain or isinstance(module, Enclosed):
                _put(module, PlannedModule(block=shared, number=number, is_for_training=module.training))
    if modules.caller is not None:
        rest |= dict([modules.caller])
    _let_go({name: module for name, module in rest.items() if name not in callers})


def _calls_of(planned: Mapping[str, BlockPlan]) -> list[list[BlockPlan]]:
    """Return the plans of blocks that one tape follows: those of a chain, and each other alone."""
    calls: dict[str, list[BlockPlan]] = {}
    for block in planned.values():
        calls.setdefault(block.chain or f"alone {block.fqn}", []).append(block)
    return list(calls.values())


def _let_go(modules: Mapping[str, nn.Module]) -> None:
    """Let modules run untouched that an earlier plan has put regions around."""
    for fqn, module in modules.items():
        if isinstance(module, Enclosed):
            plain = PlannedBlock(plan=BlockPlan(fqn=fqn, plain=True), ledger=HostLedger())
            _put(module, PlannedModule(block=plain))


def enclose_beside(plan: Plan, modules: ModelModules) -> None:
    """Put on what stands next to compiled blocks what a plan says of it, in place.

    Args:
        plan, modules: as of `enclose`; blocks are compiled.

    Raises:
        StrategyError: as of `enclose`.
    """
    planned, every = require_blocks(plan, modules), modules.all()
    ledger = HostLedger()
    for block in planned.values():
        shared = PlannedBlock(plan=block, ledger=ledger)
        _put_caller(shared, modules)
        for number, name in enumerate(block.modules):
            module = every[name]
            region_of = PlannedModule(block=shared, number=number, is_for_training=module.training)
            region_of.is_compiled = name in modules.blocks
            _put(module, region_of)


def _put_caller(shared: PlannedBlock, modules: ModelModules) -> None:
    """Put a region around what calls a block whose plan has operators before it."""
    if shared.plan.caller is not None:
        assert modules.caller is not None, "the plan's caller is the model's"
        caller = modules.caller[1]
        _put(caller, PlannedCaller(block=shared, is_for_training=caller.training))


def _put(module: nn.Module, planned: Region) -> None:
    """Put a region around a module, or inside the one that plans the model at its first call."""
    present = region.region_of(module)
    if isinstance(present, HoldsRegion):
        present.inner = planned
    else:
        region.enclose(module, planned, holds_call=False)


def groups_of(plan: Plan) -> Mapping[str, Group]:
    """Return the groups of a plan, by the FQN of their first block."""
    members: dict[str, list[str]] = {}
    for block in plan.blocks:
        if block.group:
            members.setdefault(block.group, []).append(block.fqn)
    return {first: Group(fqns) for first, fqns in members.items()}


def require_blocks(plan: Plan, modules: ModelModules) -> Mapping[str, BlockPlan]:
    """Return the plans of blocks, and of modules next to them, by FQN.

    Args:
        plan, modules: as of `enclose`.

    Raises:
        StrategyError: the plan names a module that is none, or was made with another torch.
    """
    made_with = plan.versions.get(_VERSION)
    if made_with != torch.__version__:
        problem = (
            f"was made with torch {made_with}, and this is {torch.__version__}, whose operators may differ"
        )
        raise StrategyError("ac.plan_file", f"{problem}; make it again")
    blocks = modules.blocks
    planned: dict[str, BlockPlan] = {block.fqn: block for block in plan.blocks}
    _require_names(planned, modules)
    unplanned = next((fqn for fqn in blocks if fqn not in planned and plan.blocks), None)
    if unplanned is not None:
        problem = f"does not plan {unplanned!r}, and the last block it plans is {plan.blocks[-1].fqn!r}"
        raise StrategyError("ac.plan_file", f"{problem}; use a plan of this model")
    return planned


def _require_names(planned: Mapping[str, BlockPlan], modules: ModelModules) -> None:
    """Refuse a plan that names a module that is none of those that it may decide about.

    Raises:
        StrategyError: naming it.
    """
    blocks = modules.blocks
    for fqn in (name for block in planned.values() for name in block.modules or (block.fqn,)):
        if fqn not in blocks and fqn not in modules.beside:
            problem = f"plans {fqn!r}, and the blocks of this model are {', '.join(blocks)}"
            raise StrategyError("ac.plan_file", f"{problem}; use a plan of this model")
    found = None if modules.caller is None else modules.caller[0]
    caller = next((block.caller for block in planned.values() if block.caller not in {None, found}), None)
    if caller is not None:
        problem = f"has operators of {caller!r}, and the module that calls the blocks is {found!r}"
        raise StrategyError("ac.plan_file", f"{problem}; use a plan of this model")
