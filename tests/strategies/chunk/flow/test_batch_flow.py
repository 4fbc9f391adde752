"""Which models run on a part of their batch, and which parts do the same as the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.base import PlannedStep
from strategies.chunk.flow.batch_flow import BatchFlow
from strategies.chunk.planning.rehearsal import Rehearsal

B, C = 4, 8


class Model(nn.Module):
    """A forward of a linear layer, a norm, a convolution and what else is at hand."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(C, C), nn.GroupNorm(2, C)
        self.convolution, self.dropout = nn.Conv2d(C, C, 3, padding=1), nn.Dropout(0.5)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Block(nn.Module):
    """A block with two results, and an input that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(C, C), nn.ReLU())

    def forward(self, x: Tensor, _: Tensor) -> dict[str, Any]:
        return {"x": self.linear(x), "more": (x.sum(-1), x.mean(0))}


def _blocks(model: Any, x: Tensor) -> Tensor:
    y = model.layers[0](x, x.mean(0))["x"]
    result: Tensor = model.layers[1](y, y)["more"][0]
    return result


def _attention(model: Any, x: Tensor) -> Tensor:
    y = model.norm(x.transpose(1, 2)).transpose(1, 2)
    q, k, v = (model.linear(y).unflatten(-1, (2, -1)).transpose(1, 2) for _ in range(3))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


PICTURE = torch.randn(B, C, 4, 4)
TOKENS = torch.randn(B, 6, C)
RUNS: dict[str, tuple[Callable[[Any, Tensor], Any], Tensor]] = {
    "rows": (lambda m, x: m.linear(x).relu(), TOKENS),
    "norm and convolution": (lambda m, x: m.convolution(m.norm(x)), PICTURE),
    "attention": (_attention, TOKENS),
    "blocks of two results": (_blocks, TOKENS),
    "a batch merged with rows": (lambda m, x: m.linear(x.view(-1, C)).view(x.shape), TOKENS),
    "zeros beside each sample": (lambda _, x: torch.cat((x.new_zeros(x.shape[0], 1, C), x), 1), TOKENS),
    "several results": (lambda m, x: (m.linear(x), [x.sum(1)], None), TOKENS),
}  # fmt: skip
MEETS: dict[str, tuple[Callable[[Any, Tensor], Any], Tensor]] = {
    "a mean of samples": (lambda _, x: x - x.mean(0), TOKENS),
    "a loss": (lambda m, x: m.linear(x).sum(), TOKENS),
    "samples in another order": (lambda _, x: x.flip(0), TOKENS),
    "random numbers": (lambda m, x: m.dropout(x), TOKENS),
    "a write to an input": (lambda _, x: x.mul_(2) + 1, TOKENS),
    "an input that is given back": (lambda m, x: (m.linear(x), x), TOKENS),
    "two results on one memory": (lambda m, x: m.linear(x).chunk(2, -1), TOKENS),
    "one sample": (lambda m, x: m.linear(x), TOKENS[:1]),
    "results of different sizes": (lambda m, x: (m.linear(x), x.sum(0)), TOKENS),
}  # fmt: skip
OTHERWISE: dict[str, tuple[Callable[[Any, Tensor], Any], Tensor]] = {
    "a number of samples": (lambda m, x: m.linear(x) / x.shape[0], TOKENS),
    "a branch": (lambda m, x: m.linear(x) if x.shape[0] > 2 else m.linear(x).relu(), TOKENS),
    "another operator": (lambda _, x: x.exp() if x.shape[0] > 2 else x.sin(), TOKENS),
    "a constant": (lambda m, x: m.linear(x) * torch.tensor([float(x.shape[0])]), TOKENS),
    "another order of inputs": (lambda m, x: m.linear(x) - x if x.shape[0] > 2 else x - m.linear(x), TOKENS),
    "other positions": (lambda _, x: x[:, : x.shape[0]].exp(), TOKENS),
}  # fmt: skip


def rehearsal_of(body: Callable[[Any, Tensor], Any], x: Tensor) -> Rehearsal:
    return Rehearsal.of(Model(body), (x,), PlannedStep(), training=False)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_parts_of_a_batch_do_what_the_whole_does(name: str, length: int) -> None:
    rehearsal = rehearsal_of(*RUNS[name])
    graphs = rehearsal.recorded("chunk")
    flow = BatchFlow.of(graphs)
    assert flow is not None
    assert (flow.size, flow.cuts) == (B, (True,))
    assert flow.is_kept_by(graphs, rehearsal.of_part(flow, length).recorded("chunk"), length)


@pytest.mark.parametrize("name", MEETS)
def test_samples_that_meet_run_together(name: str) -> None:
    assert BatchFlow.of(rehearsal_of(*MEETS[name]).recorded("chunk")) is None


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_part_for_which_python_does_something_else_is_found(name: str) -> None:
    rehearsal = rehearsal_of(*OTHERWISE[name])
    graphs = rehearsal.recorded("chunk")
    flow = BatchFlow.of(graphs)
    assert flow is not None
    assert not flow.is_kept_by(graphs, rehearsal.of_part(flow, 2).recorded("chunk"), 2)


def test_what_all_samples_share_is_not_cut() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return x * shared.exp()

    sample = TOKENS, torch.randn(6, C)
    flow = BatchFlow.of(Rehearsal.of(Shared(), sample, PlannedStep(), training=False).recorded("chunk"))
    assert flow is not None
    assert flow.cuts == (True, False)
