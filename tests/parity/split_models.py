"""Models that a tensor parallel plan splits by column and row, some of which do not compute the same then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.python import PythonSpec

_WIDTH, _HEAD = 16, 4


class Chain(nn.Module):
    """Embedding, two blocks, head: tokens (B, S) to logits (B, S, 32)."""

    def __init__(self, block: type[nn.Module], *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, _WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, 32)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


class Split(nn.Module):
    """Two linears, `up` by column and `down` by row, and code between them."""

    hidden, out = 32, 32

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, self.hidden)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, _HEAD))
        self.down = nn.Linear(self.out, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.between(self.up(x)))
        return output

    def between(self, hidden: Tensor) -> Tensor:
        return functional.dropout(torch.relu(hidden), 0.5, self.training)


class FusedQueries(Split):
    """Queries, keys and values one after another: a shard has those of other heads."""

    hidden, out = 3 * _WIDTH, _WIDTH

    def between(self, hidden: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, _HEAD)).transpose(1, 2) for each in hidden.chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class FusedHeads(Split):
    """Query, key and value of one head after those of another."""

    hidden, out = 3 * _WIDTH, _WIDTH

    def between(self, hidden: Tensor) -> Tensor:
        q, k, v = hidden.unflatten(-1, (-1, 3 * _HEAD)).transpose(1, 2).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class MeanOfFeatures(Split):
    """Each rank takes the mean of its own features."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(-1, keepdim=True)


class NormOfHeads(Split):
    """Each rank has the gradient of the norm's weight that comes from its own heads."""

    def between(self, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (-1, _HEAD))
        return (functional.normalize(heads, dim=-1) * self.norm).flatten(-2)


class Uneven(Split):
    """More features than two ranks can share evenly."""

    hidden, out = 33, 33


class ThreeHeads(FusedHeads):
    """Heads that two ranks cannot share, of features that they can."""

    hidden, out = 3 * 3 * _HEAD, 3 * _HEAD


BLOCKS: dict[str, type[nn.Module]] = {
    block.__name__: block
    for block in (Split, FusedQueries, FusedHeads, MeanOfFeatures, NormOfHeads, Uneven, ThreeHeads)
}


def chain(block: str, *, is_tied: bool = False) -> nn.Module:
    """Return a chain of such blocks."""
    return Chain(BLOCKS[block], is_tied=is_tied)


def spec(block: str, *, is_tied: bool = False, **options: Any) -> PythonSpec:
    """Return the description of a chain; its plan splits `up` and `down`, unless `options` say otherwise."""
    plan = {"tp_column": ("layers.*.up",), "tp_row": ("layers.*.down",)}
    return PythonSpec(
        name="chain",
        layers_fqn="layers",
        vocab_size=32,
        dropout=None,
        factory=f"{__name__}:chain",
        kwargs={"block": block, "is_tied": is_tied},
        **{**plan, **options},
    )
