"""Whose code raised: the model's where it called what raised, ours where we did."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature

import pytest
import torch
from torch import nn

from harness.fit.in_process import handed_over
from harness.models.base import Batch
from harness.models.parts.given_inputs import GivenInputs
from harness.records.store import parsed
from harness.trial.models_error import raised_by_model


class _Raising(nn.Module):
    def forward(self, act: Callable[[], object]) -> None:
        act()


def _mismatch() -> None:
    torch.zeros(2, 3) @ torch.zeros(2, 3)


def _raise() -> None:
    raise ValueError("the width is odd")


def _as_loss(act: Callable[[], object]) -> None:
    batch = Batch(inputs=(), targets=None)
    given = GivenInputs(loss_fn=lambda _outputs: act(), example=batch, draw=None, forward=Signature())
    given.loss(None, batch)


def _as_loss_in_process(act: Callable[[], object]) -> None:
    with handed_over(nn.Identity, (torch.ones(1),), lambda _outputs: act()) as (spec, _):
        spec.loss(None, Batch(inputs=(), targets=None))


@pytest.mark.parametrize(
    "called", [_Raising(), _as_loss, _as_loss_in_process], ids=["a model", "its loss", "a loss in process"]
)
@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        pytest.param(_raise, "ValueError", "the width is odd", id="its own"),
        # torch 2.15 says which operator first
        pytest.param(_mismatch, "RuntimeError", "mat1 and mat2 shapes", id="an operator that it calls"),
    ],
)
def test_what_the_model_raises_is_said_with_its_place(
    called: Callable[[Callable[[], object]], None], act: Callable[[], object], kind: str, words: str
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        called(act)
    said = raised_by_model(raised.value)
    assert said is not None
    assert said.startswith(f"{kind}: ")
    assert words in said
    assert "(test_models_error.py, line " in said
    assert said.endswith(f"in {act.__name__})")


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda: _Raising()(lambda: parsed("1" * 30)), id="below the model"),
        pytest.param(_raise, id="beside it"),
        pytest.param(lambda: _as_loss_in_process(lambda: parsed("1" * 30)), id="below a loss"),
    ],
)
def test_what_others_raise_is_not_the_models(act: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"64 bits|odd") as raised:
        act()
    assert raised_by_model(raised.value) is None
