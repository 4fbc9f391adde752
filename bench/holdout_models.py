"""Models of timm that no test uses: small, with random weights and pictures; PYTHONPATH must have timm."""

from __future__ import annotations

import importlib
from collections.abc import Callable

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


def _made(model: nn.Module) -> _Made:
    torch.manual_seed(0)
    pictures = torch.randn(4, 3, 32, 32)
    return model, (pictures,), lambda outputs: outputs.float().square().mean()
