"""`python -m strategies.fx.show`: the regions of a model and the code that they become.

Without a model it shows the case of ColossalAI's test of nested activation checkpoints.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from strategies.ac.nested import Nested
from strategies.errors import StrategyError

_SEED_LABELS = {
    "linear1": [0, 0, 0],
    "linear2": [0, 0, None],
    "linear3": [0, 0, 1],
    "linear4": [0, 1, None],
    "linear5": 1,
}


class Chain(nn.Module):
    """Six linears, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(1, 7):
            setattr(self, f"linear{index}", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, 4)."""
        for layer in self.children():
            x = layer(x)
        return x


def chain() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the chain and an input for it."""
    return Chain(), (torch.empty(4, 4),)


def main(words: Sequence[str] | None = None) -> int:
    """Print the regions and the code; return 2 where the model or the labels are refused."""
    parser = argparse.ArgumentParser(prog="python -m strategies.fx.show", description=__doc__)
    parser.add_argument(
        "factory", nargs="?", help="package.module:function, which returns (model, positional inputs)"
    )
    parser.add_argument("--labels", type=_yaml, help="paths of submodules: '{layers.0: [0, 1]}'")
    parser.add_argument("--labels-file", help="YAML file with such paths")
    parser.add_argument("--levels", type=_yaml, help="even split of the blocks: '[2, 2]'")
    parser.add_argument("--layers-fqn", default="", help="container of the blocks that --levels splits")
    given = parser.parse_args(words)
    labels = given.labels
    if given.factory is None and given.levels is None and given.labels_file is None and labels is None:
        labels = _SEED_LABELS
    try:
        nested = Nested(
            layers_fqn=given.layers_fqn, levels=given.levels, labels=labels, labels_file=given.labels_file
        )
        with torch.device("meta"):
            model, inputs = _made(given.factory)
        sys.stdout.write(f"{nested.view('regions', model, inputs)}\n")
    except StrategyError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no YAML") from error


def _made(factory: str | None) -> tuple[nn.Module, tuple[Any, ...]]:
    if factory is None:
        return chain()
    name, _, function = factory.partition(":")
    try:
        found = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise StrategyError(
            "factory", f"{factory!r} is not there: {error}; use package.module:function"
        ) from error
    made = found()
    if not (isinstance(made, tuple) and len(made) in {2, 3} and isinstance(made[0], nn.Module)):
        problem = f"must return (model, positional inputs) and perhaps a loss, got {type(made).__name__}"
        raise StrategyError("factory", problem)
    model, inputs = made[:2]
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


if __name__ == "__main__":
    sys.exit(main())
