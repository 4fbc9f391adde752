"""A loop over the batch gives what the model gives, and is left out where it would not."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.chunk import ChunkPlan
from strategies.chunk.running.chunked_forward import chunked_forwards
from tests.strategies.chunk.models import PictureBlock

B, C, ROWS = 6, 8, 16


class Model(nn.Module):
    """Blocks, and a number that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PictureBlock(C) for _ in range(2))
        self.divides = False

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        x = x / x.shape[0] if self.divides else x
        return {"x": x if scale is None else x * scale, "means": (x.mean((1, 2, 3)), B)}


@pytest.fixture(scope="module")
def pair() -> tuple[Model, Model, Tensor]:
    """Return a model, its copy under a plan with chunks of three samples, and an input."""
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(B, C, ROWS, ROWS)
    plan = replace(ChunkPlan.make(model, (x,), fraction=0.9), batch=3)
    copied = copy.deepcopy(model)
    plan.apply(copied)
    return model, copied, x


def runs(model: nn.Module) -> int:
    """Return how often the model ran in its latest call."""
    batch = chunked_forwards(model)[""].batch
    assert batch is not None
    return batch.chunks


def check(model: Model, copied: Model, *inputs: Tensor) -> None:
    with torch.no_grad():
        expected, actual = model(*inputs), copied(*inputs)
    assert actual["means"][1] == B
    for one, other in ((actual["x"], expected["x"]), (actual["means"][0], expected["means"][0])):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "expected"), [(6, 2), (7, 3), (3, 0), (1, 0)])
def test_a_batch_of_any_size_runs_in_chunks(
    pair: tuple[Model, Model, Tensor], size: int, expected: int
) -> None:
    model, copied, _ = pair
    check(model, copied, torch.randn(size, C, ROWS, ROWS))
    assert runs(copied) == expected


@pytest.mark.parametrize(("samples", "expected"), [(1, 2), (6, 2)])
def test_an_input_of_one_sample_is_shared(
    pair: tuple[Model, Model, Tensor], samples: int, expected: int
) -> None:
    model, copied, x = pair
    check(model, copied, x, torch.randn(samples, 1, 1, 1))
    assert runs(copied) == expected


def test_a_forward_that_comes_to_count_samples_runs_as_a_whole(pair: tuple[Model, Model, Tensor]) -> None:
    model, copied, x = pair
    model.divides = copied.divides = True
    check(model, copied, x)
    assert runs(copied) == 0
    model.divides = copied.divides = False
    check(model, copied, x)
    assert runs(copied) == 2


def test_hooks_of_blocks_see_all_samples(pair: tuple[Model, Model, Tensor]) -> None:
    model, copied, x = pair
    seen: list[int] = []
    handle = copied.layers[0].register_forward_hook(lambda *given: seen.append(given[2].shape[0]))
    check(model, copied, x)
    handle.remove()
    assert seen == [B]
    assert runs(copied) == 0


def test_gradients_are_those_of_the_model(pair: tuple[Model, Model, Tensor]) -> None:
    model, copied, x = pair
    for each in (model, copied):
        each(x)["x"].square().mean().backward()
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)
    assert runs(copied) == 0
