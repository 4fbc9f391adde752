"""A trainee around any module, without the harness's assembly: mean square of the outputs, plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.measure.parity.compare import Snapshot, steps
from harness.measure.trainee import Watcher, forward_and_backward
from harness.measure.work.compiled_graphs import CompiledGraphs
from harness.models.base import Batch
from strategies.regions.blocks import Enclosed


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyTrainee:
    """A model, its optimizer, and what is called in the forward pass (the model itself unless given)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    call: Callable[..., Any]
    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    compiled: CompiledGraphs | None = None

    @property
    def checkpointed(self) -> Mapping[str, nn.Module]:
        """The blocks that a region stands around."""
        return {fqn: block for fqn, block in self.blocks.items() if isinstance(block, Enclosed)}

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return outputs and the mean square of the first tensor among them."""
        outputs = self.call(*batch.inputs)
        first = outputs if isinstance(outputs, Tensor) else next(iter(outputs.values()))
        return outputs, first.square().mean()

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, batch: Batch, watcher: Watcher) -> None:
        """Run forward and backward."""
        forward_and_backward(self, batch, watcher)

    def update(self) -> None:
        """Take one optimizer step."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)


def toy_trainee(
    build: Callable[[], nn.Module], call: Callable[[nn.Module], Callable[..., Any]] | None = None
) -> ToyTrainee:
    """Return a trainee around a freshly built module; every call gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
    return ToyTrainee(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        call=model if call is None else call(model),
    )


def toy_batches(count: int, *shape: int, device: str = "cpu") -> list[Batch]:
    """Return `count` batches of one normally distributed input each."""
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(inputs=(torch.randn(*shape, generator=generator).to(device),), targets=None)
        for _ in range(count)
    ]


def toy_steps(trainee: ToyTrainee, *, count: int = 1, dp_rank: int = 0, width: int = 8) -> Iterator[Snapshot]:
    """Train `count` steps on batches of shape (4, width)."""
    return steps(trainee, toy_batches(count, 4, width), seed=7, dp_rank=dp_rank)
