"""A hook that ends a cache of torch's never runs where a recomputation stops early.

A public report: the cache of parametrizations stays on, in the whole process. The check has to put it back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.gallery.outside._checked import remedy

BEFORE = "differs; the cache is left on"
RIGHT = "differs, with early_stop=False it is neutral; the cache is off"

_WIDTH = 8


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(_WIDTH, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gain.sigmoid()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        parametrize.register_parametrization(self.linear, "weight", _Scaled())
        self.register_forward_pre_hook(_begin)
        self.register_forward_hook(_end)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.linear(x).sin().tanh())
        return outputs


class _Region(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def answer() -> str:
    """Return verdict and remedy, and what becomes of the cache."""
    inputs = torch.sin(torch.arange(48.0)).view(6, _WIDTH)
    said = remedy(lambda: nn.Sequential(_Block(), _Block()), (inputs,), _checkpoint)
    is_off = not parametrize._cache_enabled and not parametrize._cache
    return f"{said}; the cache is {'off' if is_off else 'left on'}"


def _begin(_module: nn.Module, _inputs: object) -> None:
    parametrize._cache_enabled += 1


def _end(_module: nn.Module, _inputs: object, _outputs: object) -> None:
    parametrize._cache_enabled -= 1
    if not parametrize._cache_enabled:
        parametrize._cache = {}


def _checkpoint(model: nn.Sequential) -> None:
    for place, block in enumerate(model):
        model[place] = _Region(block)
