"""Models of the proofs, as factories for `model=python`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Three bias-free matmuls, of 512 to 512, 512 to 512 and 512 to 1024, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(512, 512, bias=False)
        self.wq = nn.Linear(512, 512, bias=False)
        self.output = nn.Linear(512, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.wq(self.gate(x)))
        return outputs.sum()


class Toy(nn.Module):
    """torchtitan's toy: one block under `layers`.

    Source: https://github.com/pytorch/torchtitan, tests/unit_tests/test_activation_checkpoint.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers[0](x)
        return outputs


def toy() -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    """Return torchtitan's toy, its input and its loss."""
    return Toy(), (torch.randn(512, 512, requires_grad=True),), lambda outputs: outputs


SEQUENCE_LENGTH, WIDTH, VOCABULARY = 64, 128, 16


def batch_norm(dropout: float) -> nn.Module:
    """Return a model whose blocks normalise over the batch: tokens (B, S) to logits (B, S, V)."""
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(SEQUENCE_LENGTH), nn.ReLU()) for _ in range(4)
    )
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(VOCABULARY, WIDTH),
            layers=nn.Sequential(*blocks),
            dropout=nn.Dropout(dropout),
            head=nn.Linear(WIDTH, VOCABULARY),
        )
    )
