"""The policy of selective-op AC, asked as different versions of torch ask it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from strategies.regions import policy as policy_module
from strategies.regions.operator_names import resolve
from strategies.regions.policy import selective_contexts

MM, ADD = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor
SAVED, RECOMPUTED = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def policy_of(monkeypatch: pytest.MonkeyPatch, fired: set[str]) -> Any:
    """Return the policy that one call of a region hands to torch where a compiler records it."""
    given: list[Any] = []

    def contexts(policy: Any) -> tuple[None, None]:
        given.append(policy)
        return None, None

    monkeypatch.setattr(policy_module, "create_selective_checkpoint_contexts", contexts)
    monkeypatch.setattr(policy_module, "is_traced", lambda: True)
    selective_contexts(resolve(("aten.mm.default",), 2), fired)
    return given[0]


@pytest.mark.parametrize("recompute_asks", [pytest.param(True, id="torch 2.11 asks in both passes"), False])
def test_every_second_matmul_is_the_same_one_in_both_passes(
    monkeypatch: pytest.MonkeyPatch, recompute_asks: bool
) -> None:
    fired: set[str] = set()
    policy = policy_of(monkeypatch, fired)
    decided = {}
    for is_recompute in (False, True) if recompute_asks else (False,):
        context = SimpleNamespace(is_recompute=is_recompute, op_output=None)
        decided[is_recompute] = [policy(context, operator) for operator in (MM, ADD, MM, MM)]
    assert decided[False] == [SAVED, RECOMPUTED, RECOMPUTED, SAVED]
    assert decided.get(True, decided[False]) == decided[False]
    assert fired == {"aten.mm.default"}


def test_what_only_recomputation_runs_has_not_fired(monkeypatch: pytest.MonkeyPatch) -> None:
    fired: set[str] = set()
    policy_of(monkeypatch, fired)(SimpleNamespace(is_recompute=True), MM)
    assert fired == set()


class Attention(nn.Module):
    """A matmul and attention, which may draw."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=self.dropout).sin()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_second_backward_runs_again_what_the_first_has_taken(dropout: float) -> None:
    torch.manual_seed(0)
    contexts = partial(selective_contexts, resolve(("matmul", "attention"), 0), set())
    x, attention = torch.randn(2, 1, 4, 8, requires_grad=True), Attention(dropout)
    outputs = checkpoint(attention, x, use_reentrant=False, context_fn=contexts)
    first, second = (torch.autograd.grad(outputs.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
