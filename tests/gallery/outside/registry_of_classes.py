"""A model that asks a registry for the name of its class, as transformers does for hidden states.

Found with transformers: `BertModel` lost its `hidden_states` under ac=nested and ac=budget, silently.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from strategies import Strategy
from strategies.ac.budget import Budget
from strategies.ac.nested import Nested

BEFORE = "nested 1 of 3 results, budget 1 of 3"
RIGHT = "nested 3 of 3 results, budget 3 of 3"


class Registered(nn.Module):
    """A model that returns what its blocks make if its class is known."""

    known: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.known.add(str(self.__class__))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the last result, and all others if the class is known."""
        results = [x]
        for block in self.blocks:
            results.append(block(results[-1]))
        return tuple(results[::-1] if str(self.__class__) in self.known else results[-1:])


def answer() -> str:
    """Return how many results each variant returns."""
    x = torch.ones(4, 8)
    variants: dict[str, Strategy] = {
        "nested": Nested(layers_fqn="blocks"),
        "budget": Budget(layers_fqn="blocks", fraction=1.0),
    }
    counts = {name: len(variant.apply(Registered())(x)) for name, variant in variants.items()}
    first, *others = (f"{name} {count} of 3" for name, count in counts.items())
    return ", ".join([f"{first} results", *others])
