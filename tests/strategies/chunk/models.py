"""Small models that are chunked in tests: B batch, S sequence, D width, H heads, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS = 64, 32, 4


class Attention(nn.Module):
    """Softmax attention written out, so that scores are values of their own."""

    def __init__(self, *, causal: bool, fused: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = causal
        self.fused = fused

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, sequence, width = x_BSD.shape
        qkv = self.qkv(x_BSD).view(batch, sequence, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = (q @ k.transpose(-1, -2)) * (width // HEADS) ** -0.5
            if self.causal:
                at = torch.arange(sequence, device=x_BSD.device)
                scores = scores.masked_fill(at[None] > at[:, None], float("-inf"))
            mixed = scores.softmax(-1) @ v
        outputs: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return outputs


class Block(nn.Module):
    def __init__(self, *, causal: bool = False, fused: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(causal=causal, fused=fused)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        outputs: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return outputs


class Stack(nn.Module):
    """Blocks under `layers`."""

    def __init__(self, blocks: int = 2, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(**options) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Language(nn.Module):
    """Embedding, blocks, head and the loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = Stack(**options)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        logits = self.head(self.stack(self.embedding(tokens_BS)))
        return functional.cross_entropy(logits.flatten(0, 1), targets_BS.flatten())


class Triangle(nn.Module):
    """Triangle multiplication of an Evoformer: rows and columns of a pair meet in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.left, self.right, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, pair: Tensor) -> Tensor:
        z = self.norm(pair)
        product = torch.einsum("bikc,bjkc->bijc", self.left(z), self.right(z))
        outputs: Tensor = pair + self.out(product) * torch.sigmoid(self.gate(z))
        return outputs


class Pictures(nn.Module):
    """Convolutions, a norm of groups and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 1)
        self.third = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.norm(self.first(x)), inplace=True)
        outputs: Tensor = x + self.third(functional.interpolate(self.second(hidden), scale_factor=1))
        return outputs


def language_batch(batch: int = 1, sequence: int = 48) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (batch, sequence)), torch.randint(0, VOCABULARY, (batch, sequence))


class Heads(nn.Module):
    """Fused attention; queries, keys and values have a linear map each, so that heads can be chunked."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSD: Tensor) -> Tensor:
        parts = (part(x_BSD) for part in (self.query, self.key, self.value))
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x_BSD + self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Places(nn.Module):
    """Attention with a mask made of places, which a chunk of queries needs both cut and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSD).chunk(3, -1)
        place = torch.arange(x_BSD.size(1))
        scores = (q @ k.transpose(1, 2)).masked_fill(place > place.unsqueeze(1), float("-inf"))
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed


class PictureBlock(nn.Module):
    """Norm, convolution and what they are added to, for pictures of some channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.convolution(self.norm(x).relu())
        return result


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "attention": (Stack, lambda: (torch.randn(1, 64, WIDTH),)),
    "attention of a batch": (Stack, lambda: (torch.randn(3, 40, WIDTH),)),
    "causal attention": (lambda: Stack(causal=True), lambda: (torch.randn(1, 64, WIDTH),)),
    "fused attention": (lambda: Stack(fused=True), lambda: (torch.randn(2, 64, WIDTH),)),
    "fused attention of heads": (Heads, lambda: (torch.randn(1, 256, WIDTH),)),
    "a mask of places": (Places, lambda: (torch.randn(1, 96, WIDTH),)),
    "language model with loss": (lambda: Language(causal=True), language_batch),
    "triangle": (Triangle, lambda: (torch.randn(1, 24, 24, WIDTH),)),
    "pictures": (Pictures, lambda: (torch.randn(4, 3, 16, 16),)),
}

_OF_OTHERS = ("attention", "causal attention")
"""What the attention of a batch, and the language model, have too."""
NAMES = [pytest.param(name, marks=[pytest.mark.matrix] if name in _OF_OTHERS else []) for name in MODELS]
"""`MODELS` by name."""


def built(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the named model and its inputs, always the same."""
    torch.manual_seed(0)
    make, sample = MODELS[name]
    return make(), sample()
