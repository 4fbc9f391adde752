"""Models that no test uses: small, with random weights and inputs. Those of timm need it on PYTHONPATH."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_Made = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]
_VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 10}


def cait() -> _Made:
    """Return a class-attention transformer (timm)."""
    return _made(importlib.import_module("timm.models").Cait(**_VIT))


def xcit() -> _Made:
    """Return a cross-covariance transformer (timm)."""
    return _made(importlib.import_module("timm.models").Xcit(**_VIT | {"patch_size": 8}))


def routed() -> _Made:
    """Return a stack of experts beside one that all tokens visit; sizes depend on data."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*(_Routed(56, 5, 2) for _ in range(3)))))
    return model, (torch.randn(4, 40, 56),), lambda outputs: outputs.float().square().mean()


def residual_cnn() -> _Made:
    """Return a residual network with batch norms (He et al. 2016, arXiv:1512.03385)."""
    stages = [_Residual(12, 12), _Residual(12, 24), _Residual(24, 40)]
    return _made(_Pictures(nn.Conv2d(3, 12, 3, padding=1, bias=False), stages, 40))


def mobile_cnn() -> _Made:
    """Return inverted bottlenecks with depthwise convolutions (Sandler et al. 2018, arXiv:1801.04381)."""
    stages = [_Bottleneck(16, 16, 1), _Bottleneck(16, 24, 2), _Bottleneck(24, 24, 1), _Bottleneck(24, 36, 2)]
    return _made(_Pictures(nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), stages, 36))


class _Routed(nn.Module):
    """Experts for the best two of their scores, after a norm, and one for all."""

    def __init__(self, width: int, n_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, n_experts)
        self.experts = nn.ModuleList(_expert(width, 88) for _ in range(n_experts))
        self.shared = _expert(width, 48)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, S, D)."""
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.scores(tokens).sigmoid().topk(self.top_k, dim=-1)
        mixed: Tensor = self.shared(tokens)
        for number, expert in enumerate(self.experts):
            rows, ranks = torch.where(chosen == number)
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, ranks, None])
        return x + mixed.view_as(x)


def _expert(width: int, hidden_width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden_width), nn.GELU(), nn.Linear(hidden_width, width))


class _Pictures(nn.Module):
    """A stem, stages, and a classifier of mean features."""

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return classes of shape (B, 10)."""
        outputs: Tensor = self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))
        return outputs


class _Residual(nn.Module):
    """Two convolutions with batch norms, beside a projection; half the size where it widens."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        stride = 1 if width == out_width else 2
        self.body = nn.Sequential(
            nn.Conv2d(width, out_width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_width),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_width, out_width, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_width),
        )
        self.beside = nn.Conv2d(width, out_width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (B, out_width, H, W)."""
        return torch.relu(self.body(x) + self.beside(x))


class _Bottleneck(nn.Module):
    """Widen, filter each channel, narrow."""

    def __init__(self, width: int, out_width: int, stride: int) -> None:
        super().__init__()
        hidden = 3 * width
        self.is_residual = stride == 1
        self.body = nn.Sequential(
            nn.Conv2d(width, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.Hardswish(),
            nn.Conv2d(hidden, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, out_width, 1, bias=False),
            nn.BatchNorm2d(out_width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (B, out_width, H, W)."""
        outputs: Tensor = self.body(x)
        return x + outputs if self.is_residual else outputs


def _made(model: nn.Module) -> _Made:
    torch.manual_seed(0)
    pictures = torch.randn(4, 3, 32, 32)
    return model, (pictures,), lambda outputs: outputs.float().square().mean()
