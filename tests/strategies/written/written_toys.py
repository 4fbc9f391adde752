"""Written files of the toys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from strategies.budget.eager import first_call
from strategies.budget.export import operator_modules
from strategies.regions import blocks
from strategies.written.file_text import BlockRules
from strategies.written.heavy_operators import HeavyOperator, rules_for
from tests.strategies.toys import BATCH, SEQUENCE

TOKENS = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


def operators_of(
    model: nn.Module, sample: tuple[Any, ...] = (TOKENS,), layers_fqn: str = "layers"
) -> Mapping[str, tuple[HeavyOperator, ...]]:
    """Return the heavy operators of the blocks of a model."""
    step = first_call.shadow_step(model, sample, {})
    found = blocks.find_blocks(step.model, layers_fqn=layers_fqn, module_classes=())
    return operator_modules.heavy_operators(step, found)


def rules_of(model: nn.Module, extra_bytes: float = math.inf, **options: Any) -> dict[str, BlockRules]:
    """Return rules that keep results of `extra_bytes` at most."""
    return rules_for(operators_of(model, **options), extra_bytes)


def loaded(text: str, name: str = "apply_ac") -> Any:
    """Return a written file as a module."""
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec", dont_inherit=True), namespace)
    return namespace
