"""A sharding plan as a file, to be applied once more or by another program: JSON with all that it decided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.base import StrategyError
from strategies.shard.candidates.redistribution import Collective, LayoutStep
from strategies.shard.model.graph import PythonState
from strategies.shard.model.module_options import HeldParameter, ModuleCandidate, NodeOption
from strategies.shard.model.placement_state import Move, State
from strategies.shard.model.shard_plan import PlacedModule, PlacedParameter, ShardPlan
from strategies.text_files import read_text, write_text

_FORMAT = "acbench sharding plan 2"
_PLACEMENTS: dict[str, type[Any]] = {"Replicate": Replicate, "Partial": Partial, "Shard": Shard}
_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        ShardPlan, PlacedModule, PlacedParameter, NodeOption, ModuleCandidate, HeldParameter, Move, State,
        LayoutStep, Collective, PythonState,
    )
}  # fmt: skip


def save(plan: ShardPlan, path: Path) -> None:
    """Write `plan` to `path`, over what is there.

    The names of what the planned forward asked of Python are written too; their values are those that
    `realise` finds, as for a plan that was made just now.
    """
    write_text(path, json.dumps({"format": _FORMAT, "plan": _encoded(plan)}))


def load(path: Path) -> ShardPlan:
    """Return the plan that `save` wrote; `realise` refuses another model than it was made for.

    Raises:
        StrategyError: the file holds no plan of this version.
        OSError: it cannot be read.
    """
    try:
        held = json.loads(read_text(path))
        plan = _decoded(held["plan"]) if held["format"] == _FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError):
        plan = None
    if not isinstance(plan, ShardPlan):
        problem = f"{str(path)!r} holds no plan of this version, {_FORMAT!r}"
        raise StrategyError("shard", f"{problem}; save it again")
    return plan


def _encoded(value: Any) -> Any:
    """Return a value of a plan as JSON values, with the names of its classes."""
    if isinstance(value, Shard):
        return {"is": "Shard", "dim": value.dim}
    if isinstance(value, Placement):
        return {"is": type(value).__name__}
    if is_dataclass(value):
        held = {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
        return {"is": type(value).__name__, **held}
    if isinstance(value, Mapping):
        return {"is": "Mapping", "items": {name: _encoded(each) for name, each in value.items()}}
    return [_encoded(each) for each in value] if isinstance(value, tuple) else value


def _decoded(value: Any) -> Any:
    """Return the value of a plan that `_encoded` wrote."""
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if not isinstance(value, dict):
        return value
    if value["is"] == "Mapping":
        return {name: _decoded(each) for name, each in value["items"].items()}
    made: Any = (_PLACEMENTS | _CLASSES)[value["is"]]
    return made(**{name: _decoded(each) for name, each in value.items() if name != "is"})
