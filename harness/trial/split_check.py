"""Checks of a tensor parallel plan without memory: whether it fits, and runs on shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch.utils has no public name for it

from harness.errors import ConfigError
from harness.models.base import Batch, ModelSpec
from harness.trial.models_error import raised_by_model
from harness.trial.parallel import STYLES
from strategies.last_words import last_words
from strategies.shard.model.graph import TensorAxis

_OPTIONS = {"column": "model.tp_column", "row": "model.tp_row", "summed": "model.tp_summed"}
_SPLIT = {"column": ("out_features", "output", 0), "row": ("in_features", "input", 1)}
"""Attribute of a linear that a style splits, its name, and the dimension of the weight."""


def check_split(spec: ModelSpec, batch: Batch, tp: int) -> None:
    """Refuse a tensor parallel plan that does not fit the model, or whose shards its code cannot run on.

    The forward runs on the shapes of the first rank, against one on whole shapes. Where the latter needs
    numbers, the former is not asked.

    Args:
        batch: a rank's batch, on the meta device.
        tp: number of ranks that share tensors.

    Raises:
        ConfigError: naming the pattern or the module, and what to do.
    """
    plan = spec.tensor_parallel_plan()
    _require_styles(spec, plan)
    with torch.device("meta"):
        whole, split = spec.build(), spec.build()
    axis = TensorAxis(ranks=1, splits=plan)
    styles = ((fqn, axis.split(fqn)) for fqn, _ in split.named_modules())
    found = {fqn: style for fqn, style in styles if style is not None}
    _require_matches(spec, plan, found)
    for fqn, style in found.items():
        _require_splittable(fqn, split, style, tp)
    try:
        expected = _shapes(whole(*batch.inputs, **batch.keywords))
    except Exception:  # noqa: BLE001 (the user's code may say in any way that it needs numbers)
        return
    for fqn, style in found.items():
        _split(split.get_submodule(fqn), style, tp)
    try:
        actual = _shapes(split(*batch.inputs, **batch.keywords))
    except Exception as error:
        problem = (
            f"the code of the model does not run on the shards of its tensor parallel plan, {_said(error)}"
        )
        remedy = "split linears in pairs, column before row, and by whole heads"
        remedy = f"{remedy}, or use mesh.tp=1 without its options"
        raise ConfigError("mesh.tp", f"{problem}; {remedy}") from error
    if expected != actual:
        given, wanted = next(pair for pair in zip(actual, expected, strict=False) if pair[0] != pair[1])
        problem = f"the tensor parallel plan makes the model return {given}, where the whole returns {wanted}"
        remedy = "logits in parts need a plan of the model's own: leave the head out of model.tp_column"
        raise ConfigError("mesh.tp", f"{problem}; {remedy}")


def _require_styles(spec: ModelSpec, plan: Mapping[str, Any]) -> None:
    for pattern, style in plan.items():
        if style not in STYLES:
            named = style if isinstance(style, str) else type(style).__name__
            problem = f"the tensor parallel plan of model {spec.name!r} wants {named} for {pattern!r}"
            known = ", ".join(STYLES)
            remedy = "shard=cheapest places norms and sequences by itself"
            raise ConfigError("mesh.tp", f"{problem}, which is none of {known}; {remedy}")


def _require_matches(spec: ModelSpec, plan: Mapping[str, str], found: Mapping[str, str]) -> None:
    for pattern, style in plan.items():
        where = _OPTIONS.get(style, "")
        is_the_users = pattern in getattr(spec, where.removeprefix("model."), ())
        if is_the_users and not any(_names(pattern, fqn) for fqn in found):
            raise ConfigError(where, f"{pattern!r} names no module of the model; a star stands for one name")
    if not found:
        problem = f"the tensor parallel plan of {spec.name!r} names no module"
        raise ConfigError("mesh.tp", f"{problem}; use mesh.tp=1 without its options")


def _names(pattern: str, fqn: str) -> bool:
    return TensorAxis(ranks=1, splits={pattern: ""}).split(fqn) is not None


def _require_splittable(fqn: str, model: nn.Module, style: str, tp: int) -> None:
    """Refuse a module that cannot be split as the plan says."""
    module, where = model.get_submodule(fqn), _OPTIONS.get(style, "mesh.tp")
    if style == "summed":
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        problem = f"{fqn!r} is a {type(module).__name__}, and torch splits nn.Linear and nn.Embedding alone"
        raise ConfigError(where, f"{problem}; leave it out, or use mesh.tp=1 without its options")
    shared = next(_others_with(module, model), None)
    if shared is not None:
        problem = f"{fqn!r} shares its weight with {shared!r}, and splitting one unties them"
        raise ConfigError(where, f"{problem}; leave it out, or give it a weight of its own")
    if style in _SPLIT and isinstance(module, nn.Linear):
        attribute, side, _ = _SPLIT[style]
        size = getattr(module, attribute)
        if size % tp:
            raise ConfigError("mesh.tp", f"must divide the {size} {side} features of {fqn!r}, got {tp}")


def _others_with(module: nn.Module, model: nn.Module) -> Iterator[str]:
    """Yield the FQNs of other modules that hold a parameter of `module`."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    for fqn, other in model.named_modules():
        if other is not module and any(id(each) in own for each in other.parameters(recurse=False)):
            yield fqn


def _split(module: nn.Module, style: str, tp: int) -> None:
    """Cut the parameters of a linear to the shapes of one rank; other styles take and give wholes."""
    if not isinstance(module, nn.Linear) or style not in _SPLIT:
        return
    _, _, dim = _SPLIT[style]
    module.weight = nn.Parameter(module.weight.detach().chunk(tp, dim)[0])
    if module.bias is not None and dim == 0:
        module.bias = nn.Parameter(module.bias.detach().chunk(tp)[0])


def _shapes(outputs: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _said(error: Exception) -> str:
    words = last_words(error)
    return raised_by_model(error) or f"{words.kind}: {words.message}".partition("\n")[0]
