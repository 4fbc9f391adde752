"""Python code that checkpointing adds is heard: questions about operators, notes of tapes, regions again."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from harness.predict.fake_rank import step_log
from harness.predict.python_code import PythonCode, counted
from strategies.step.position import Position
from tests.harness.composing import experiment_of


def _body(x: Tensor) -> Tensor:
    return x.view(-1).sin().cos()


@pytest.mark.parametrize(
    ("is_selective", "calls"),
    [
        pytest.param(True, 7, id="three operators, then two that detach what they give"),
        pytest.param(False, 0, id="full AC"),
    ],
)
def test_calls_of_a_region(*, is_selective: bool, calls: int) -> None:
    heard: PythonCode = Counter()
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    options: dict[str, Any] = {"context_fn": saved} if is_selective else {}
    with counted(heard, Position()):
        output = checkpoint(_body, torch.ones(2, 2, requires_grad=True), use_reentrant=False, **options)
        output.sum().backward()
    assert heard["forward", "asked"] == calls
    with create_selective_checkpoint_contexts([])[0]:
        _body(torch.ones(2))
    assert heard.total() == calls


_TINY = "model=gpt_nano data=synthetic batch_size=2 model.n_layers=2 model.width=32 sequence_length=64"


@pytest.mark.parametrize(
    ("ac", "kinds"),
    [
        pytest.param("ac=none", set(), id="plain"),
        pytest.param("ac=full", {"again", "region"}, id="regions"),
        pytest.param("ac=selective_op", {"again", "region", "asked"}, id="regions that ask"),
        pytest.param("ac=budget ac.fraction=0.8 ac.objective=flops optimizer=sgd", {"taped"}, id="tapes"),
    ],
)
def test_a_step_says_what_python_does_beside_its_operators(ac: str, kinds: set[str]) -> None:
    log = step_log(experiment_of(f"{_TINY} {ac}"))
    assert {kind for _, kind in log.python_code} == kinds
    again = sum(each.is_recomputed and bool(each.dtype) for each in log.operators)
    assert again > 0 or not kinds
    if "region" in kinds:
        assert log.python_code["backward", "again"] == again
        assert log.python_code["backward", "region"] == 2
