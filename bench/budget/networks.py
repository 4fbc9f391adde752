"""Networks that are no transformers, on which plans are hard: factories for `model=python`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """`x + body(x)`, or `x * body(x)`."""

    def __init__(self, *body: nn.Module, gates: bool = False) -> None:
        super().__init__()
        self.body, self.gates = nn.Sequential(*body), gates

    def forward(self, x: Tensor) -> Tensor:
        """Return both joined."""
        y: Tensor = self.body(x)
        return x * y if self.gates else x + y


class Pointwise(nn.Module):
    """A function of each element or row."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of `x`."""
        return self.function(x)


def outer(x: Tensor) -> Tensor:
    """Return the outer product of each row with itself, (B, D * D) from (B, D)."""
    return (x[..., :, None] * x[..., None, :]).flatten(-2)


class GatedCell(nn.Module):
    """A step of a recurrence that reads the input of its block, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 3 * width)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        """Return the next state."""
        i, g, o = self.gates(torch.cat([h, x], -1)).chunk(3, -1)
        return torch.sigmoid(o) * torch.tanh(torch.sigmoid(i) * g + h)


class Cells(nn.Module):
    """Several steps of a recurrence, and a residual."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(GatedCell(width) for _ in range(steps))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after the last step, mixed."""
        h = x
        for cell in self.cells:
            h = cell(h, x)
        out: Tensor = self.out(h + x)
        return out


class Lstm(nn.Module):
    """A layer of LSTM cells, step by step, and a residual; shapes (B, S, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return all states."""
        state, states = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state[0])
        return x + torch.stack(states, 1)


class SelectiveScan(nn.Module):
    """A state space layer whose matrices follow from its input, as a loop over time (B, S, D)."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.step, self.matrices = nn.Linear(width, width), nn.Linear(width, 2 * states)
        self.decay, self.outputs = nn.Parameter(torch.rand(width, states)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and what the states say of it."""
        u, gate = self.inputs(self.norm(x)).chunk(2, -1)
        dt, (b, c) = functional.softplus(self.step(u)), self.matrices(u).chunk(2, -1)
        h, found = torch.zeros(*x[:, 0].shape, self.decay.shape[1], device=x.device), []
        for t in range(x.shape[1]):
            h = torch.exp(-dt[:, t, :, None] * self.decay) * h + (dt * u)[:, t, :, None] * b[:, t, None]
            found.append((h * c[:, t, None]).sum(-1))
        out: Tensor = x + self.outputs(torch.stack(found, 1) * functional.silu(gate))
        return out


class ConvNext(nn.Module):
    """A block of ConvNeXt: convolution by channel, norm, and two layers with GELU between; (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.by_channel = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and the block's part."""
        y = self.mlp(self.norm(self.by_channel(x).movedim(1, -1)))
        out: Tensor = x + (self.scale * y).movedim(-1, 1)
        return out


class EncoderDecoder(nn.Module):
    """Layers of an encoder, and of a decoder that reads its outputs, with dropout."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        kinds = [nn.TransformerEncoderLayer] * layers + [nn.TransformerDecoderLayer] * layers
        made = (kind(width, 4, 4 * width, dropout, batch_first=True) for kind in kinds)
        self.blocks, self.encoder = nn.ModuleList(made), layers

    def forward(self, x: Tensor) -> Tensor:
        """Return the decoder's outputs for the encoder's inputs."""
        memory = y = x
        for block in self.blocks[: self.encoder]:
            memory = block(memory)
        for block in self.blocks[self.encoder :]:
            y = block(y, memory)
        return y


class Blocks(nn.Module):
    """A stem, and blocks one after another, maybe several of them as one."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], together: int = 1) -> None:
        super().__init__()
        starts = range(0, len(blocks), together)
        joined = blocks if together == 1 else [nn.Sequential(*blocks[a : a + together]) for a in starts]
        self.stem, self.blocks = stem, nn.ModuleList(joined)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(outputs: Tensor) -> Tensor:
    """Return the mean square."""
    return outputs.float().square().mean()


def funnel(together: int = 1) -> Any:
    """Return blocks of other widths each, which save their outputs."""
    widths = (32, 96, 64, 128, 48, 160, 32)
    blocks: list[nn.Module] = [
        nn.Sequential(
            Residual(nn.Linear(a, 2 * b), nn.GELU(), nn.Linear(2 * b, a)), nn.Linear(a, b), nn.Tanh()
        )
        for a, b in pairwise(widths)
    ]
    return Blocks(nn.Linear(32, 32), blocks, together), (torch.randn(256, 32),), loss


def convskip(together: int = 1) -> Any:
    """Return convolutions with gates and skips."""
    blocks: list[nn.Module] = [
        Residual(
            nn.Conv1d(16, 16, 3, padding=1),
            nn.ReLU(),
            Residual(nn.Conv1d(16, 32, 3, padding=1), nn.SiLU(), nn.Conv1d(32, 16, 3, padding=1), gates=True),
            nn.GELU(),
        )
        for _ in range(5)
    ]
    return Blocks(nn.Conv1d(16, 16, 1), blocks, together), (torch.randn(32, 16, 64),), loss


def outer_products(together: int = 1) -> Any:
    """Return blocks whose largest values are outer products, which cost little."""
    blocks: list[nn.Module] = [
        Residual(
            nn.Linear(24, 12),
            nn.Tanh(),
            Pointwise(outer),
            Pointwise(torch.sin),
            nn.SiLU(),
            nn.Linear(144, 24),
        )
        for _ in range(5)
    ]
    return Blocks(nn.Linear(24, 24), blocks, together), (torch.randn(384, 24),), loss


def cheap_chains(together: int = 1) -> Any:
    """Return blocks of many operators without FLOPs."""
    cheap: Any = (torch.sin, torch.exp, torch.tanh, torch.sigmoid, functional.gelu, torch.cos)
    blocks: list[nn.Module] = [
        nn.Sequential(
            nn.Linear(48, 48),
            Residual(*map(Pointwise, cheap), gates=True),
            Residual(nn.Linear(48, 192), nn.Sigmoid(), nn.Linear(192, 48)),
        )
        for _ in range(4)
    ]
    return Blocks(nn.Linear(48, 48), blocks, together), (torch.randn(256, 48),), loss


def uneven(together: int = 1) -> Any:
    """Return blocks of one to six times the width."""
    blocks: list[nn.Module] = [
        Residual(
            nn.Linear(40, k * 40),
            nn.GELU(),
            Residual(nn.Linear(k * 40, k * 40), nn.Sigmoid(), gates=True),
            nn.Linear(k * 40, 40),
        )
        for k in (1, 6, 2, 4, 1, 3)
    ]
    return Blocks(nn.Linear(40, 40), blocks, together), (torch.randn(256, 40),), loss


def cells() -> Any:
    """Return blocks of gated cells, each of which reads the block's input."""
    blocks: list[nn.Module] = [Cells(32, steps=4) for _ in range(4)]
    return Blocks(nn.Linear(32, 32), blocks), (torch.randn(256, 32),), loss


def lstm() -> Any:
    """Return layers of LSTM cells."""
    blocks: list[nn.Module] = [Lstm(32) for _ in range(3)]
    return Blocks(nn.Linear(32, 32), blocks), (torch.randn(16, 12, 32),), loss


def scan(steps: int = 16) -> Any:
    """Return selective scans."""
    blocks: list[nn.Module] = [SelectiveScan(32, 8) for _ in range(2)]
    return Blocks(nn.Linear(32, 32), blocks), (torch.randn(2, steps, 32),), loss


def convnext(together: int = 1) -> Any:
    """Return blocks of ConvNeXt."""
    blocks: list[nn.Module] = [ConvNext(24) for _ in range(5)]
    return Blocks(nn.Conv2d(3, 24, 4, 4), blocks, together), (torch.randn(4, 3, 64, 64),), loss


def encoder_decoder() -> Any:
    """Return an encoder and a decoder with dropout, whose blocks read the encoder's outputs."""
    return EncoderDecoder(32, layers=3, dropout=0.1), (torch.randn(8, 32, 32),), loss
