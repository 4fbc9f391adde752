"""Folding of a tape: the calls inside a module become one call of it, where a region holds all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from strategies.base import StrategyError
from strategies.nested.nest_options import Regions
from strategies.nested.nested_regions import Path
from strategies.nested.tape import Call, Slot
from strategies.regions.blocks import submodule

UNITS = FSDPModule | FullyShardedDataParallel
"""Modules whose parameters FSDP exchanges."""


@dataclass(kw_only=True, slots=True, eq=False)
class Edge:
    """The place on a tape where a call of a module that holds labels begins or ends.

    Fields:
        call: that call as a whole; `None` where no region was open when it began.
    """

    fqn: str
    is_begin: bool
    call: Call | None
    label: Path = ()
    regions: Regions = ()


def folded(tape: Sequence[Call | Edge], model: nn.Module) -> list[Call]:
    """Return calls where those inside a module are one call of it, unless a region begins or ends there.

    Raises:
        StrategyError: one does, and the module of `model` has hooks or is an FSDP unit.
    """
    calls = [each for each in tape if isinstance(each, Call)]
    if len(calls) == len(tape):
        return calls
    last_read = {slot: at for at, each in enumerate(tape) if isinstance(each, Call) for slot in each.read()}
    calls.clear()
    begun: list[tuple[int, Edge]] = []
    for at, each in enumerate(tape):
        if isinstance(each, Call):
            calls.append(each)
        elif each.is_begin:
            begun.append((len(calls), each))
        else:
            start, begin = begun.pop() if begun else (0, None)
            whole = None if begin is None else _whole(begin, each, calls[start:], last_read, at)
            if whole is None:
                _refuse_hooks(model, each.fqn)
            else:
                calls[start:] = [whole]
    for _, each in begun:
        _refuse_hooks(model, each.fqn)
    return calls


def _whole(
    begin: Edge, end: Edge, inside: Sequence[Call], last_read: Mapping[Slot, int], at: int
) -> Call | None:
    """Return the call of a module, which ends at `at`, in place of the calls `inside` of it.

    `None` where a region holds a part of them, or something behind reads what the module does not return.
    """
    whole = begin.call
    if whole is None or begin.regions != end.regions:
        return None
    made = {slot for call in inside for slot in call.made}.difference(whole.made)
    if any(last_read.get(slot, -1) > at for slot in made if slot.position >= 0):
        return None
    whole.label, whole.regions = end.label, end.regions
    whole.tickets = [ticket for call in inside for ticket in call.tickets]
    return whole


def _refuse_hooks(model: nn.Module, fqn: str) -> None:
    """Refuse to go around the call of a module that does more than its forward."""
    module = submodule(model, fqn)
    is_unit = isinstance(module, UNITS)
    kinds = "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"
    if is_unit or any(vars(module)[f"_{kind}"] for kind in kinds):
        what = "an FSDP unit" if is_unit else "a module with hooks"
        problem = f"a region begins inside {fqn!r}, {what}, and ends outside of it"
        raise StrategyError("ac.labels", f"{problem}, or the other way round; end it with {fqn!r}")
