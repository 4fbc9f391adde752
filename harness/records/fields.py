"""Typed dataclasses from JSON values, and back.

JSON has no NaN and no infinity: such numbers are the strings "nan", "inf" and "-inf" there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from harness.records.files import read_text

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


def decode_file(cls: type[T], path: Path, most_bytes: int) -> T | None:
    """Return the dataclass that a file describes; `None` where it is missing, torn, too long or another."""
    try:
        return decode(cls, json.loads(read_text(path, most_bytes)), path.name)
    except (OSError, ValueError, RecursionError):
        return None


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


_Field = tuple[str, Any, frozenset[type[Any]], bool]


@cache
def _fields(cls: type[Any]) -> tuple[_Field, ...]:
    """Return of each field: name, type, what needs no decoding, whether it may be missing."""
    nothing, hints = (dataclasses.MISSING, dataclasses.MISSING), typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            hints[field.name],
            _kept(hints[field.name]),
            (field.default, field.default_factory) != nothing,
        )
        for field in dataclasses.fields(cls)
    )


@cache
def _kept(kind: Any) -> frozenset[type[Any]]:
    """Return the types of values that `kind` takes as they are: most of a record, and not worth a call."""
    kinds = _taken_apart(kind)[1] if isinstance(kind, types.UnionType) else (kind,)
    kept = {each for each in kinds if each in _WORDS or each is types.NoneType}
    return frozenset(kept - {int} if float in kept else kept)  # an integer may have to become a float


def _dataclass(cls: Any, value: object, where: str) -> Any:
    """Return the dataclass `cls` with the fields of an object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: must be an object, got {value!r}")  # noqa: TRY004 (it is a value of a file)
    given = {}
    for name, kind, kept, may_be_missing in _fields(cls):
        if name in value:
            item = value[name]
            given[name] = item if type(item) in kept else _value(kind, item, f"{where}.{name}")
        elif not may_be_missing:
            raise ValueError(f"{where}.{name}: is missing")
    return cls(**given)


def _value(kind: Any, value: object, where: str) -> Any:
    if kind is Any:
        return value
    origin, arguments = _taken_apart(kind)
    if origin is None:
        return _scalar(kind, value, where) if kind in _WORDS else _dataclass(kind, value, where)
    if origin is types.UnionType:
        return _union(arguments, value, where)
    if origin is dict:
        return _mapping(arguments[1], value, where)
    return _sequence(arguments[0], value, where)


@cache
def _taken_apart(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return origin and arguments of a generic type; asking typing for every value takes half the time."""
    return typing.get_origin(kind), typing.get_args(kind)


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
    if _are_all(kind, value.values()):
        return {str(key): item for key, item in value.items()}
    return {str(key): _value(kind, item, f"{where}.{key}") for key, item in value.items()}


def _sequence(kind: Any, value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: must be a list, got {value!r}")  # noqa: TRY004 (it is a value of a file)
    if _are_all(kind, value):
        return tuple(value)
    is_row = dataclasses.is_dataclass(kind)
    fields = _fields(kind) if is_row else ()
    return tuple(
        kind(**item) if fields and _is_plain(fields, item) else _value(kind, item, f"{where}[{index}]")
        for index, item in enumerate(value)
    )


def _is_plain(fields: tuple[_Field, ...], value: object) -> bool:
    """Say if an object has all fields, and values that need no decoding: a timeline has hundreds of them."""
    if type(value) is not dict or len(value) != len(fields):
        return False
    for name, _, kept, _ in fields:  # noqa: SIM110 (all() takes twice the time)
        if type(value.get(name, fields)) not in kept:
            return False
    return True


def _are_all(kind: Any, values: Iterable[object]) -> bool:
    """Return whether there is nothing to decode: long rows of numbers are most of a record."""
    kept = _kept(kind)
    return bool(kept) and all(type(value) in kept for value in values)


def _scalar(kind: type[Any], value: object, where: str) -> Any:
    if kind is float and (type(value) in {int, float} or value in _NON_FINITE):
        return float(typing.cast("float | str", value))
    if type(value) is not kind:  # bool is an int to isinstance
        raise ValueError(f"{where}: must be {_WORDS[kind]}, got {value!r}")
    return value
