"""The operators that the show command knows: their options, and their candidates."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strategies.shard import linear
from strategies.shard.candidates import Candidate
from strategies.shard.layout import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """An operator on the command line.

    Fields:
        summary: one line of help.
        add_options: adds the options that only this operator has.
        candidates: its candidates for parsed options.
    """

    summary: str
    add_options: Callable[[ArgumentParser], None]
    candidates: Callable[[Namespace], tuple[Candidate, ...]]


def sizes(text: str) -> Shape:
    """Return `4,4,16` as a tuple.

    Raises:
        ArgumentTypeError: it is no list of integers.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be integers with commas between, got {text!r}") from None


def _add_linear(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--input", type=sizes, required=True, metavar="B,K", help="shape, batch dimensions first"
    )
    parser.add_argument("--out", type=int, required=True, metavar="N", help="output features")
    parser.add_argument("--no-bias", action="store_true", help="without a bias")


def _linear(options: Namespace) -> tuple[Candidate, ...]:
    return linear.candidates(options.input, options.out, options.mesh, options.mode, bias=not options.no_bias)


OPERATORS: Mapping[str, Shown] = {
    "linear": Shown(summary="output = input x weight^T + bias", add_options=_add_linear, candidates=_linear),
}
