"""The first recomputed value that forward did not make is named, and what is right has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.measure.probes.recomputed_values import RecomputedValues, _margin, _ranked, recomputed_values
from tests.toy_trainee import toy_batches, toy_trainee


class Region(nn.Module):
    """A linear and a function, recomputed together."""

    def __init__(self, function: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.options = options

    def run(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = checkpoint(self.run, x, use_reentrant=False, **self.options)
        return outputs


def _values(build: Callable[[], nn.Module]) -> RecomputedValues:
    batch = toy_batches(1, 4, 8)[0]
    return recomputed_values(toy_trainee(build), batch, seed=1, device=torch.device("cpu"))


def test_what_repeats_has_no_divergence() -> None:
    found = _values(lambda: Region(lambda h: torch.dropout(h, 0.5, train=True)))
    assert found.first is None
    assert found.count == 6


def test_a_value_drawn_anew_is_named() -> None:
    found = _values(lambda: Region(lambda h: torch.dropout(h, 0.5, train=True), preserve_rng_state=False))
    assert found.first is not None
    assert (found.first.operator, found.first.module, found.first.call, found.first.has_run) == (
        *("aten.bernoulli_.float", "(model)", 0),
        True,
    )
    assert "gives another value than in forward" in str(found.first)


def test_an_operator_that_forward_did_not_run_is_named() -> None:
    functions = iter((torch.sin, torch.cos))

    def other(h: Tensor) -> Tensor:
        return next(functions)(h)

    found = _values(lambda: Region(other))
    assert found.first is not None
    assert (found.first.operator, found.first.has_run) == ("aten.cos.default", False)


def test_the_margin_of_a_choice_stands_beside_its_noise() -> None:
    noises = iter((0.0, 0.25))

    def choose(h: Tensor) -> Tensor:
        scores = torch.tensor([[3.0, 2.5, 0.0]]) + next(noises)
        return h * scores.topk(1).values

    (margin,) = _values(lambda: Region(choose)).margins
    assert (margin.margin, margin.noise) == (0.5, 0.25)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_choice_of_all_has_no_next(columns: int) -> None:
    found = _values(lambda: Region(lambda h: h[:, :columns].topk(columns).values))
    assert [margin.margin for margin in found.margins] == [float("inf")]


@pytest.mark.parametrize(
    ("options", "margin"),
    [((1, -1, True), 7.0), ((1, -1, False), 1.0), ((2, 0, True), 1.0), ((4,), float("inf"))],
)
def test_a_margin_is_to_the_next_of_what_is_chosen(options: tuple[Any, ...], margin: float) -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert _margin(_ranked(scores, *options), options[0]) == margin
