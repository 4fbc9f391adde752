"""What every benchmark leaves: a table for people and a JSON file for programs."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console, RenderableType

from harness.measure.environment import describe
from harness.records.files import SHARED, write_atomically

_WIDTH = 160
"""Columns of a table that goes to a file: the longest row shall not be folded."""


def run_part(command: str, parts: Mapping[str, str]) -> NoReturn:
    """Run the part of `command` that `--part` names, or the first, with the other options, and exit.

    Args:
        command: a package of `bench`.
        parts: what each of its modules that can be run asks, by name.
    """
    lines = [f"  {name}: {question}" for name, question in parts.items()]
    chooser = argparse.ArgumentParser(
        prog=f"python -m bench.{command}",
        description="\n".join(["parts, each with its own options; without one the first:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    chooser.add_argument("--part", choices=parts)
    chosen, words = chooser.parse_known_args()
    if chosen.part is None and {"-h", "--help"} & {*words}:
        print(chooser.format_help())  # the options of the first part follow
    module = importlib.import_module(f"bench.{command}.{chosen.part or next(iter(parts))}")
    sys.exit(module.main(words))


def parser(description: str | None, name: str, command: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser of benchmark `name`, with `--out`.

    Args:
        description: the docstring of the benchmark's module.
        name: of the benchmark; the JSON file is called after it.
        command: that it is a part of, where it is not the first.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m bench.{name}" if command is None else f"python -m bench.{command} --part {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, default=Path("outputs/bench", f"{name}.json"), help="the JSON file")
    return made


def publish(
    table: RenderableType,
    path: Path,
    *,
    protocol: Mapping[str, Any],
    results: Any,
    device: torch.device | str = "cpu",
) -> None:
    """Print `table` and write what it shows to `path`.

    Args:
        table: for people; one or a group of several.
        path: the JSON file; folders are made.
        protocol: how it was measured: sizes, repeats, order.
        results: JSON values and dataclasses; numbers in base units (bytes, seconds, FLOPs).
        device: what the environment describes.
    """
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
    keep(path, protocol=protocol, results=results, device=device)
    print(path)


def keep(
    path: Path, *, protocol: Mapping[str, Any], results: Any, device: torch.device | str = "cpu"
) -> None:
    """Write what there is so far to `path`; arguments are those of `publish`."""
    content = {"protocol": dict(protocol), "environment": describe(device), "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1, default=asdict) + "\n", mode=SHARED)


def status_of(wrong: Sequence[Any]) -> int:
    """Say which rows are not as they must be; return 1 where there is one."""
    for row in wrong:
        sys.stderr.write(f"not as it must be: {row}\n")
    return int(bool(wrong))
