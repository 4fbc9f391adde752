"""Typed dataclasses from JSON values, and back.

JSON has no NaN and no infinity: such numbers are the strings "nan", "inf" and "-inf" there.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

_NON_FINITE = ("nan", "inf", "-inf")
_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def decode(cls: type[T], value: object, where: str) -> T:
    """Return the dataclass `cls` that the JSON object `value` describes.

    Keys that `cls` does not know are ignored, so that a record of a later version with more fields stays
    readable; a missing key takes its default.

    Args:
        cls: a dataclass of int, float, str, bool, `Any`, unions of them, `dict[str, X]`, `tuple[X, ...]`
            and dataclasses.
        value: what `json` returned.
        where: path of `value`, for messages.

    Raises:
        ValueError: a key is missing or a value has another type; the message names its path.
    """
    decoded: T = _dataclass(cls, value, where)
    return decoded


def encode(value: Any) -> Any:
    """Return `value` as JSON values: dataclasses become objects, tuples lists, NaN and infinities strings."""
    if dataclasses.is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _dataclass(cls: Any, value: object, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: must be an object, got {value!r}")  # noqa: TRY004 (it is a value of a file)
    present = {field.name: field for field in dataclasses.fields(cls) if field.name in value}
    for field in dataclasses.fields(cls):
        optional = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if field.name not in present and not optional:
            raise ValueError(f"{where}.{field.name}: is missing")
    return cls(**{name: _value(_hints(cls)[name], value[name], f"{where}.{name}") for name in present})


def _value(kind: Any, value: object, where: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _union(arguments, value, where)
    if origin is dict:
        return _mapping(arguments[1], value, where)
    if origin is tuple:
        return _sequence(arguments[0], value, where)
    return _scalar(kind, value, where)


def _union(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not types.NoneType]
    for kind in others:
        try:
            return _value(kind, value, where)
        except ValueError:
            continue
    return _value(last, value, where)


def _mapping(kind: Any, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: must be an object, got {value!r}")  # noqa: TRY004 (it is a value of a file)
    return {str(key): _value(kind, item, f"{where}.{key}") for key, item in value.items()}


def _sequence(kind: Any, value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: must be a list, got {value!r}")  # noqa: TRY004 (it is a value of a file)
    return tuple(_value(kind, item, f"{where}[{index}]") for index, item in enumerate(value))


def _scalar(kind: type[Any], value: object, where: str) -> Any:
    if kind is float and (type(value) in {int, float} or value in _NON_FINITE):
        return float(typing.cast("float | str", value))
    if type(value) is not kind:  # bool is an int to isinstance
        raise ValueError(f"{where}: must be {_WORDS[kind]}, got {value!r}")
    return value
