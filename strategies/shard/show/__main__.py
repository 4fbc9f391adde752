"""`python -m strategies.shard.show linear --input 4,4,4,16 --out 32 --mesh 2,2`: candidates as a table."""

from __future__ import annotations

import argparse
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strategies.base import StrategyError
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.layout import Index, IndexEntry, Shape
from strategies.shard.candidates.redistribution import Phase
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.catalogue import OPERATORS, Argument, ArgumentKind

_NEGATIVE = re.compile(r"-\d")
_CONSTANTS: dict[str, IndexEntry] = {"None": None, "...": ...}
_LEGEND = (
    "Placements by dimension: S01 is sharded over mesh axes 0 and 1, R is replicated. Collectives by "
    "operand@axis with the payload of each. FLOPs, memory and time are those of one rank in one step."
)
_GAP = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 2 when the arguments do not describe an operator on a mesh."""
    parser = argparse.ArgumentParser(
        prog="python -m strategies.shard.show", description="Sharding candidates of an operator on a mesh."
    )
    commands = parser.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for name, operator in OPERATORS.items():
        command = commands.add_parser(name, help=operator.summary, description=operator.summary)
        command.add_argument(
            "--mesh", type=sizes, required=True, metavar="N,M", help="sizes of the mesh axes"
        )
        if operator.has_modes:
            command.add_argument("--mode", choices=("classic", "complete"), default="classic")
        for each, argument in operator.arguments.items():
            add_argument(command, each, argument)
    options = vars(parser.parse_args(joined(sys.argv[1:] if arguments is None else arguments)))
    operator = OPERATORS[options["operator"]]
    try:
        operation = operator.describe(**{name: options[name] for name in operator.arguments})
        found = candidates(operation, options["mesh"], options.get("mode", "complete"))
    except StrategyError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    print_candidates(found)
    return 0


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


def print_candidates(candidates: Sequence[ShardingCandidate]) -> None:
    """Print one line a candidate, as wide as it takes."""
    cheapest = sorted(candidates, key=lambda each: (each.cost.total_s, each.cost.memory_bytes))
    columns = (
        "candidate",
        *(operand.name for operand in candidates[0].operands),
        "forward",
        "backward",
        "kFLOP",
        "memory B",
        "time µs",
    )
    rows = [_row(candidate) for candidate in cheapest]
    table = Table(box=box.SIMPLE_HEAD)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="right" if index >= len(columns) - _GAP else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # plain text: rich reads brackets as markup
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    console = Console(highlight=False)
    console.width = max(console.width, sum(widths) + _GAP * len(widths) + 1)
    console.print(table)
    console.print(f"{len(rows)} candidates. {_LEGEND}", soft_wrap=True)


def _row(candidate: ShardingCandidate) -> tuple[str, ...]:
    cost = candidate.cost
    return (
        candidate.name,
        *(operand.spec for operand in candidate.operands),
        _collectives(candidate, "forward"),
        _collectives(candidate, "backward"),
        f"{(cost.forward_flops + cost.backward_flops) / 1e3:.1f}",
        str(cost.memory_bytes),
        f"{cost.total_s * 1e6:.3f}",
    )


def _collectives(candidate: ShardingCandidate, phase: Phase) -> str:
    """Return `all_reduce output@0 4096 B`; axes over which the same happens stand together."""
    axes: dict[tuple[str, str, int], list[str]] = {}
    for collective in candidate.communication:
        if collective.phase == phase:
            what = collective.kind, collective.operand, collective.payload_bytes
            axes.setdefault(what, []).append(str(collective.mesh_axis))
    words = [
        f"{kind} {operand}@{','.join(over)} {payload} B" for (kind, operand, payload), over in axes.items()
    ]
    return "; ".join(words) or "-"


if __name__ == "__main__":
    sys.exit(main())
