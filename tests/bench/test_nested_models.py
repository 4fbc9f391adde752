"""The table of other people's models under nested regions: what differs, crashes or is refused is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bench.nested.nested_models import Outcome, Usage, compared, is_as_claimed, labels_of, used

ROW = Usage(architecture="library/Name", way="plain", outcome="bitwise")
BITWISE = [ROW] * 98
_BEFORE: list[Tensor] = []


class Layered(nn.Module):
    """Two blocks, and what is done to the input of the second."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.single = nn.Sequential(nn.Linear(3, 3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.single(self.layers[1](self.between(self.layers[0](x))))  # type: ignore[no-any-return]


def remembered(x: Tensor) -> Tensor:
    """Add what the call before got, a list that nobody puts back."""
    _BEFORE.append(x.detach())
    return x * (1 + sum(_BEFORE)) if len(_BEFORE) % 3 else x


class Failing(nn.Linear):
    """Fails where a region runs again."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise LookupError
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    ("between", "outcome"),
    [
        pytest.param(torch.tanh, "bitwise", id="a function"),
        pytest.param(lambda x: x.view(-1, 7), "plain model fails", id="an error"),
        pytest.param(lambda x: x.add_(1) if x.sum() < 9e9 else x, "bitwise", id="a change in place"),
        pytest.param(remembered, "silent", id="a global"),
    ],
)
def test_what_becomes_of_a_usage(between: Callable[[Tensor], Tensor], outcome: Outcome) -> None:
    found = compared(ROW, Layered(between), lambda _: ((torch.ones(2, 3),), {}))
    assert (found.outcome, found.regions) == (outcome, 2)


def test_an_error_in_backward_is_a_crash() -> None:
    model = Layered(torch.tanh)
    model.layers[0] = Failing(3, 3)
    found = compared(ROW, model, lambda _: ((torch.ones(2, 3),), {}))
    assert (found.outcome, found.sentence) == ("crashed", "LookupError: ")


@pytest.mark.parametrize(
    ("rows", "is_right"),
    [
        pytest.param(BITWISE, True, id="all equal"),
        pytest.param([*BITWISE, *[replace(ROW, outcome="refused")] * 2], True, id="two of 100 refused"),
        pytest.param([*BITWISE[1:], *[replace(ROW, outcome="refused")] * 3], False, id="three refused"),
        pytest.param([*BITWISE, replace(ROW, outcome="silent")], False, id="one silent"),
        pytest.param([*BITWISE, replace(ROW, outcome="crashed")], False, id="one crashed"),
    ],
)
def test_what_is_claimed(rows: list[Usage], *, is_right: bool) -> None:
    assert is_as_claimed(rows) is is_right


def test_the_children_of_outermost_lists_are_labelled() -> None:
    assert labels_of(Layered(torch.tanh)) == {"layers.0": [0, 0], "layers.1": [0, 1]}


def test_an_architecture_is_used_in_every_way() -> None:
    pytest.importorskip("transformers")
    rows = list(used("transformers/DistilBertConfig"))
    assert {row.way: row.outcome for row in rows} == dict.fromkeys(
        ["plain", "hidden states", "labels", "padding mask", "mask and labels", "changing lengths"], "bitwise"
    )
