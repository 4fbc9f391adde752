"""Six models as their authors write them, which tests checkpoint with written files.

Shapes: B batch, S sequence, D width, C channels, H and W height and width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, BLOCKS, VOCABULARY, BATCH = 64, 2, 3, 128, 4


class Attention(nn.Module):
    """Attention of heads, with the kernel of a name."""

    def __init__(self, dropout: float, kernel: str, *, causal: bool) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout, self.kernel, self.causal = dropout, kernel, causal

    def forward(self, x_BSD: Tensor, read_BTD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        q = self.query(x_BSD).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (
            each.transpose(1, 2) for each in self.key_value(read_BTD).unflatten(-1, (2, HEADS, -1)).unbind(2)
        )
        around: AbstractContextManager[Any] = (
            sdpa_kernel(SDPBackend.MATH) if self.kernel == "math" else nullcontext()
        )
        with around:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout, is_causal=self.causal
            )
        out_BSD: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out_BSD


class Block(nn.Module):
    """A block of a transformer; it reads from elsewhere too where it is told to."""

    def __init__(self, dropout: float, kernel: str, *, causal: bool = True, crosses: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(dropout, kernel, causal=causal)
        self.crossing = Attention(dropout, kernel, causal=False) if crosses else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x_BSD: Tensor, read_BTD: Tensor | None = None) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        normed = self.norm(x_BSD)
        x_BSD = x_BSD + self.attention(normed, normed)
        if self.crossing is not None and read_BTD is not None:
            x_BSD = x_BSD + self.crossing(x_BSD, read_BTD)
        out_BSD: Tensor = x_BSD + self.mlp(x_BSD)
        return out_BSD


class LlamaBlock(nn.Module):
    """Products without bias, a gate, and numbers that turn with positions."""

    def __init__(self, dropout: float, kernel: str) -> None:
        super().__init__()
        self.attention = Attention(dropout, kernel, causal=True)
        self.norm, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(3 * WIDTH, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        angle = torch.arange(x_BSD.size(1), device=x_BSD.device, dtype=x_BSD.dtype)[:, None]
        normed = self.norm(x_BSD) * angle.cos()
        x_BSD = x_BSD + self.dropout(self.attention(normed, normed))
        normed = self.norm_mlp(x_BSD)
        gated = functional.silu(self.gate(normed))
        gated *= self.up(normed)  # in place
        out_BSD: Tensor = x_BSD + self.down(gated)
        return out_BSD


class Decoder(nn.Module):
    """Tokens (B, S) to logits (B, S, V)."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV


class ViT(nn.Module):
    """Images (B, 3, H, W) to classes (B, V)."""

    def __init__(self, dropout: float, kernel: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(dropout, kernel, causal=False) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits of shape (B, V)."""
        logits_BV: Tensor = self.head(self.blocks(self.patches(images_BCHW).flatten(2).mT).mean(1))
        return logits_BV


class Multimodal(nn.Module):
    """Tokens that read images: blocks of two containers."""

    def __init__(self, dropout: float, kernel: str) -> None:
        super().__init__()
        self.embedding, self.patches = nn.Embedding(VOCABULARY, WIDTH), nn.Conv2d(3, WIDTH, 8, stride=8)
        self.vision = nn.ModuleList(Block(dropout, kernel, causal=False) for _ in range(2))
        self.blocks = nn.ModuleList(Block(dropout, kernel, crosses=True) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BS: Tensor, *, images_BCHW: Tensor, mask_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        seen_BTD = self.patches(images_BCHW).flatten(2).mT
        for block in self.vision:
            seen_BTD = block(seen_BTD)
        x_BSD = self.embedding(tokens_BS) * mask_BS[..., None]
        for block in self.blocks:
            x_BSD = block(x_BSD, read_BTD=seen_BTD)
        logits_BSV: Tensor = self.head(x_BSD)
        return logits_BSV


class EncoderDecoder(nn.Module):
    """Tokens that are read, and tokens that are written."""

    def __init__(self, dropout: float, kernel: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block(dropout, kernel, causal=False) for _ in range(2))
        self.blocks = nn.ModuleList(Block(dropout, kernel, crosses=True) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, read_BT: Tensor, tokens_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        read_BTD = self.embedding(read_BT)
        for block in self.encoder:
            read_BTD = block(read_BTD)
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, read_BTD)
        logits_BSV: Tensor = self.head(x_BSD)
        return logits_BSV


class ResBlock(nn.Module):
    """Two convolutions, with activations in place."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.SiLU(inplace=True),
            nn.Dropout(dropout), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        out_BCHW: Tensor = x_BCHW + self.body(x_BCHW)
        return out_BCHW


class UNet(nn.Module):
    """Images to images, down and up again with a shortcut."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ResBlock(channels, dropout) for channels in (16, 32, 32, 16))
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return images of the same shape."""
        first = self.blocks[0](self.stem(images_BCHW))
        deep = self.blocks[2](self.blocks[1](self.down(first)))
        out_BCHW: Tensor = self.out(self.blocks[3](self.up(deep) + first))
        return out_BCHW


def gpt(dropout: float = 0.0, kernel: str = "fused") -> Any:
    """Return a GPT with its inputs and its loss."""
    tokens_BS = torch.randint(VOCABULARY, (BATCH, 64))
    return Decoder(lambda: Block(dropout, kernel)), (tokens_BS,), _next_token(tokens_BS)


def llama(dropout: float = 0.0, kernel: str = "fused") -> Any:
    """Return a model like Llama, whose gate is written in place."""
    tokens_BS = torch.randint(VOCABULARY, (BATCH, 64))
    return Decoder(lambda: LlamaBlock(dropout, kernel)), (tokens_BS,), _next_token(tokens_BS)


def vit(dropout: float = 0.0, kernel: str = "fused") -> Any:
    """Return a ViT."""
    return ViT(dropout, kernel), (torch.randn(BATCH, 3, 32, 32),), lambda out: out.float().square().mean()


def multimodal(dropout: float = 0.0, kernel: str = "fused") -> Any:
    """Return a model of tokens and images, which takes inputs by name alone."""
    tokens_BS, mask_BS = torch.randint(VOCABULARY, (BATCH, 32)), torch.ones(BATCH, 32)
    inputs = {"tokens_BS": tokens_BS, "images_BCHW": torch.randn(BATCH, 3, 32, 32), "mask_BS": mask_BS}
    return Multimodal(dropout, kernel), inputs, _next_token(tokens_BS)


def encoder_decoder(dropout: float = 0.0, kernel: str = "fused") -> Any:
    """Return an encoder and a decoder with a tied head."""
    read_BT, tokens_BS = (torch.randint(VOCABULARY, (BATCH, size)) for size in (48, 32))
    return EncoderDecoder(dropout, kernel), (read_BT, tokens_BS), _next_token(tokens_BS)


def unet(dropout: float = 0.0, kernel: str = "none") -> Any:  # noqa: ARG001 (it has no attention)
    """Return a UNet."""
    return UNet(dropout), (torch.randn(BATCH, 3, 16, 16),), lambda out: out.float().square().mean()


def _next_token(tokens_BS: Tensor) -> Callable[[Tensor], Tensor]:
    def loss(logits_BSV: Tensor) -> Tensor:
        return functional.cross_entropy(logits_BSV[:, :-1].float().flatten(0, 1), tokens_BS[:, 1:].flatten())

    return loss
