"""What the caller trains on: one batch, or several micro-batches of one step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from harness.errors import ConfigError
from harness.measure.probes.interlude import Pass
from harness.models.base import Batch

_SHAPES = "must be a tuple of positional inputs, a dict of keyword inputs, or a list of several of these"


def step_of(passes: Sequence[Pass]) -> Batch:
    """Return what one step reads: `passes`, one after the other."""
    return Batch(inputs=tuple((inputs, dict(keywords)) for inputs, keywords in passes), targets=None)


def passes_of(batch: Batch) -> Iterator[Pass]:
    """Yield the passes of a step that `step_of` made."""
    yield from batch.inputs


def given_passes(batch: Any) -> tuple[Pass, ...]:
    """Return the passes of what the caller gave.

    Raises:
        ConfigError: it is nothing of the kind, or cannot be copied for each step.
    """
    parts = batch if isinstance(batch, list) else [batch]
    if not parts:
        raise ConfigError("batch", f"{_SHAPES}, got an empty list")
    passes = tuple(map(_pass, parts))
    try:
        copy.deepcopy(passes)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError("batch", f"cannot be copied, and each step needs its own: {error}") from error
    return passes


def _pass(part: Any) -> Pass:
    if isinstance(part, Tensor):
        return (part,), {}
    if isinstance(part, Mapping):
        return (), {str(name): value for name, value in part.items()}
    if isinstance(part, tuple):
        return part, {}
    raise ConfigError("batch", f"{_SHAPES}, got {type(part).__name__}")
