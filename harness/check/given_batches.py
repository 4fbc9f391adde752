"""The batches that the caller of a check trains on: one, or several micro-batches of one step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from harness.errors import ConfigError
from harness.models.base import Batch

_SHAPES = "must be a tuple of positional inputs, a dict of keyword inputs, or a list of several of these"


def given_batches(batch: Any) -> tuple[Batch, ...]:
    """Return the micro-batches of what the caller gave.

    Raises:
        ConfigError: it is nothing of the kind, or cannot be copied for each step.
    """
    parts = batch if isinstance(batch, list) else [batch]
    if not parts:
        raise ConfigError("batch", f"{_SHAPES}, got an empty list")
    batches = tuple(map(_batch, parts))
    try:
        copy.deepcopy([(each.inputs, each.keywords) for each in batches])
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError("batch", f"cannot be copied, and each step needs its own: {error}") from error
    return batches


def _batch(part: Any) -> Batch:
    if isinstance(part, Tensor):
        return Batch(inputs=(part,), targets=None)
    if isinstance(part, Mapping):
        return Batch(inputs=(), targets=None, keywords={str(name): value for name, value in part.items()})
    if isinstance(part, tuple):
        return Batch(inputs=part, targets=None)
    raise ConfigError("batch", f"{_SHAPES}, got {type(part).__name__}")
