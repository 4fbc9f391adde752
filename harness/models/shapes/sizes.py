"""The sizes of a model: every number among the fields of its specification."""

from __future__ import annotations

import dataclasses

from harness.models.base import ModelSpec, require_shape

_CHECKED_APART = ("dropout", "vocab_size")


def require_sizes(spec: ModelSpec) -> None:
    """Refuse a size below 1, an empty vocabulary, or a dropout outside [0, 1).

    Raises:
        ConfigError: naming the first field that is out of range.
    """
    numbers = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if field.type in {"int", "float"} and field.name not in _CHECKED_APART
    }
    require_shape(spec, **numbers)
