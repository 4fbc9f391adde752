"""Models of the sharding tests, and how their axis is described."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.estimate.machine import A100
from strategies.shard.model.graph import ModelGraph, TensorAxis
from strategies.shard.model.graph_building import model_graph

SPLITS = {"blocks.*.up": "column", "blocks.*.down": "row"}
AXIS = TensorAxis(ranks=2, splits=SPLITS)
SAMPLE = (torch.zeros(4, 6, dtype=torch.int64, device="meta"),)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.up(self.norm(x))
        output: Tensor = x + self.down(self.dropout(functional.relu(hidden)))
        return output


class Chain(nn.Module):
    """Embedding, blocks, head: `(4, 6)` tokens to `(4, 6, 10)` logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Tied(Chain):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Unlisted(Chain):
    """Between the linears of a block stands a function of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.dropout = Sorted()


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=-1).values


def meta(model: type[nn.Module], **options: Any) -> nn.Module:
    with torch.device("meta"):
        return model(**options).train()


@cache  # a graph is for reading
def graph(model: type[nn.Module] = Chain, **options: Any) -> ModelGraph:
    return model_graph(meta(model, **options), SAMPLE, AXIS, A100)
