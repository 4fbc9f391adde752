"""Options of the show command: how shapes, numbers and indices are written on the command line."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any

from strategies.shard.candidates.layout import Index, IndexEntry, Shape
from strategies.shard.operators.catalogue import Argument, ArgumentKind

_NEGATIVE = re.compile(r"-\d")
_CONSTANTS: dict[str, IndexEntry] = {"None": None, "...": ...}


def add_argument(parser: ArgumentParser, name: str, argument: Argument) -> None:
    """Add an operator's argument to a command line, which parses it under `name`."""
    if argument.kind in ("present", "absent"):
        action = "store_true" if argument.kind == "present" else "store_false"
        parser.add_argument(argument.flag, dest=name, action=action, help=argument.help)
        return
    parser.add_argument(
        argument.flag,
        dest=name,
        type=_READERS[argument.kind],
        metavar=argument.metavar,
        required=argument.default is None,
        default=argument.default,
        action="append" if argument.kind == "several sizes" else "store",
        help=argument.help,
    )


def joined(arguments: Sequence[str]) -> list[str]:
    """Return `--dims -1,0` as `--dims=-1,0`: argparse takes plain numbers alone for values."""
    found: list[str] = []
    for argument in arguments:
        is_value = _NEGATIVE.match(argument) and found and found[-1].startswith("--") and "=" not in found[-1]
        if is_value:
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def sizes(text: str) -> Shape:
    """Return `4,4,16` as a tuple. Raises ArgumentTypeError: it is no list of integers."""
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be comma-separated integers, got {text!r}") from None


def index(text: str) -> Index:
    """Return `0,:4,None,...` as a tuple of what stands there.

    Raises:
        ArgumentTypeError: an entry is neither an integer nor a slice, `None` or an ellipsis.
    """
    try:
        return tuple(_entry(entry) for entry in text.split(","))
    except ValueError:
        problem = "must be comma-separated integers, slices, None and ..."
        raise ArgumentTypeError(f"{problem}, got {text!r}") from None


_READERS: dict[ArgumentKind, Callable[[str], Any]] = {
    "sizes": sizes,
    "several sizes": sizes,
    "number": int,
    "index": index,
}


def _entry(text: str) -> IndexEntry:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if ":" in text:
        return slice(*(int(bound) if bound else None for bound in text.split(":", maxsplit=2)))
    return int(text)
