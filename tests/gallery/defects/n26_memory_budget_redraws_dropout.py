"""The compiler's memory budget draws dropout anew."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn
from torch.nn import functional

from tests.gallery.case import Case, Evidence


class Dropping(nn.Module):
    budget = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.double))
        self.compiled = torch.compile(self.plain, backend="aot_eager_decomp_partition")

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        assert self.budget, "read here, so that another budget is another graph"
        return functional.dropout(x.mm(self.weight), 0.5).sin().mm(self.weight).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with functorch.patch(activation_memory_budget=self.budget):
            return self.compiled(x)


def make() -> nn.Module:
    return Dropping()


def variant(model: Any) -> Any:
    model.budget = 0.5
    return model


CASE = Case(
    make=make,
    batch=(torch.sin(torch.arange(64.0 * 64)).view(64, 64).double(),),
    variant=variant,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "rng_state"), gradients=1.2),
    names=("weight",),
    needs="dynamo",
    link="https://github.com/pytorch/pytorch/issues/190758",
    why="The partitioner recomputes the mask in backward without its RNG state.",
    fix="Use a budget of 1.0 for graphs with dropout.",
)
