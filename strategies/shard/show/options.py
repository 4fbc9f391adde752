"""Options of the show command: how shapes, numbers and indices are written on the command line."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.shard.candidates.layout import Shape
from strategies.shard.operators.getitem import Entry, Index

_NEGATIVE = re.compile(r"-\d")
_CONSTANTS: dict[str, Entry] = {"None": None, "...": ...}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of one operator.

    Fields:
        flag: `--input`.
        help: what it is.
        metavar: what stands for its value; an option without is a switch.
        type: reads the value.
        default: without the option; `None` where it is required.
        is_repeated: whether it may stand several times.
    """

    flag: str
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = int
    default: Any = None
    is_repeated: bool = False

    def add_to(self, parser: ArgumentParser) -> None:
        """Add it to the command line."""
        if self.metavar is None:
            parser.add_argument(self.flag, action="store_true", help=self.help)
            return
        parser.add_argument(
            self.flag,
            type=self.type,
            metavar=self.metavar,
            required=self.default is None,
            default=self.default,
            action="append" if self.is_repeated else "store",
            help=self.help,
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
    """Return `4,4,16` as a tuple.

    Raises:
        ArgumentTypeError: it is no list of integers.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be integers with commas between, got {text!r}") from None


def index(text: str) -> Index:
    """Return `0,:4,None,...` as a tuple of what stands there.

    Raises:
        ArgumentTypeError: an entry is neither an integer nor a slice, `None` or an ellipsis.
    """
    try:
        return tuple(_entry(entry) for entry in text.split(","))
    except ValueError:
        raise ArgumentTypeError(
            f"must be integers, slices, None and ... with commas between, got {text!r}"
        ) from None


def _entry(text: str) -> Entry:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if ":" in text:
        return slice(*(int(bound) if bound else None for bound in text.split(":", maxsplit=2)))
    return int(text)
