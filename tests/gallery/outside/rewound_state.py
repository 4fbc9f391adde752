"""A block under rewind=True whose buffer grows, and one that keeps sizes of splits for its recomputation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategies.ac.full import Full
from tests.gallery.outside._gradients import Model

BEFORE = "grown: RuntimeError: The size of tensor a (7) must match; splits: IndexError: pop from empty list"
RIGHT = "grown: right; splits: right where they are named"


class Growing(nn.Module):
    """Scales by the mean of a cache, to which each call adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cache: Tensor
        self.register_buffer("cache", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        y: Tensor = torch.tanh(self.layer(x) * self.cache.mean())
        self.cache.data = torch.cat([self.cache, torch.full((3,), 2.0)])
        return y


class Splitting(nn.Module):
    """Counts once, and keeps the count for its recomputation."""

    acbench_not_rewound = ("splits",)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.splits = nn.Linear(4, 4), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        is_recomputation = torch._C._current_graph_task_id() != -1
        if not is_recomputation:
            self.splits.append(float(len(x)))
        share = self.splits.pop() if is_recomputation else self.splits[-1]
        y: Tensor = torch.tanh(self.layer(x * share))
        return y


def answer() -> str:
    """Return whether gradients are right, or what is raised."""
    splits = _told(Splitting)
    return f"grown: {_told(Growing)}; splits: {splits}{' where they are named' if splits == 'right' else ''}"


def _told(block: type[nn.Module]) -> str:
    rewinding = Full(layers_fqn="blocks", rewind=True)
    try:
        equal = all(map(torch.equal, _gradients(Model(block)), _gradients(rewinding.apply(Model(block)))))
    except (RuntimeError, LookupError) as error:
        return f"{type(error).__name__}: {str(error).partition(' the size')[0]}"
    return "right" if equal else "wrong"


def _gradients(model: nn.Module) -> list[Tensor]:
    model(torch.ones(2, 4)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
