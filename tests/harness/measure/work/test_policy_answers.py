"""Answers of policies are counted, and those of which torch says nothing are noted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness.measure.work.policy_answers import answers_heard
from harness.records.measured import MeasuredWork

SIN, SUM = torch.ops.aten.sin.default, torch.ops.aten.sum.default


def _body(x: Tensor) -> Tensor:
    return x.view(-1).sin().cos()


def _stepped(policy: Any) -> float:
    """Return a number of the gradient of a step whose body is checkpointed under `policy`."""
    leaf = torch.ones(2, 2, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(_body, leaf, use_reentrant=False, context_fn=contexts).sum().backward()
    assert leaf.grad is not None
    return leaf.grad[0, 0].item()


def _answering(word: object) -> Callable[..., object]:
    """Return a policy that says `word` of the sine, and that all else is made again."""

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> object:
        return word if operator is SIN else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@pytest.mark.parametrize(
    ("policy", "answers", "notes"),
    [
        pytest.param([SIN], {"MUST_SAVE": 1, "PREFER_RECOMPUTE": 2}, 0, id="a list"),
        pytest.param([SUM], {"PREFER_RECOMPUTE": 3}, 1, id="a list of operators that never run"),
        pytest.param(
            _answering(CheckpointPolicy.PREFER_SAVE),
            {"PREFER_SAVE": 1, "PREFER_RECOMPUTE": 2},
            0,
            id="a function",
        ),
        pytest.param(_answering(word=True), {"MUST_SAVE": 1, "PREFER_RECOMPUTE": 2}, 0, id="a bool"),
        pytest.param(_answering("must_save"), {"'must_save'": 1, "PREFER_RECOMPUTE": 2}, 2, id="a word"),
        pytest.param(_answering(None), {"None": 1, "PREFER_RECOMPUTE": 2}, 2, id="nothing"),
        pytest.param(
            _answering(CheckpointPolicy.MUST_RECOMPUTE),
            {"MUST_RECOMPUTE": 1, "PREFER_RECOMPUTE": 2},
            1,
            id="all again",
        ),
    ],
)
def test_answers_of_a_policy(policy: Any, answers: dict[str, int], notes: int) -> None:
    with answers_heard() as heard:
        measured = _stepped(policy)
    assert heard == answers
    assert measured == _stepped(policy)  # nothing is heard any more, and nothing has changed
    assert heard.total() == 3
    work = MeasuredWork(
        forward_flops=0, backward_flops=0, recomputed_flops=0, recomputed_ops={}, policy_answers=dict(heard)
    )
    assert len([*work.policy_notes()]) == notes
