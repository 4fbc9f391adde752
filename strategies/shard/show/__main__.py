"""The show command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from strategies.base import StrategyError
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.operators.catalogue import OPERATORS
from strategies.shard.show.options import add_argument, joined, sizes
from strategies.shard.show.table import print_candidates


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


if __name__ == "__main__":
    sys.exit(main())
