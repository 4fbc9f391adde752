"""The show command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from strategies.errors import StrategyError
from strategies.shard.show.operators import OPERATORS
from strategies.shard.show.options import joined, sizes
from strategies.shard.show.table import print_candidates


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 2 when the arguments do not describe an operator on a mesh."""
    parser = argparse.ArgumentParser(
        prog="python -m strategies.shard.show", description="Sharding candidates of an operator on a mesh."
    )
    commands = parser.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for name, shown in OPERATORS.items():
        command = commands.add_parser(name, help=shown.summary, description=shown.summary)
        command.add_argument(
            "--mesh", type=sizes, required=True, metavar="N,M", help="sizes of the mesh axes"
        )
        if shown.has_modes:
            command.add_argument("--mode", choices=("classic", "complete"), default="classic")
        for option in shown.options:
            option.add_to(command)
    options = parser.parse_args(joined(sys.argv[1:] if arguments is None else arguments))
    try:
        found = OPERATORS[options.operator].candidates(options)
    except StrategyError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    print_candidates(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
