"""Four micro-batches are in flight in a model that `ac=budget` planned at its first call.

The budget was one call's, and the step took 2.5 times as many bytes without a word.
"""

from __future__ import annotations

import torch
from torch import nn

from harness.models.llama import LlamaSpec
from strategies import StrategyError
from strategies.ac.budget import Budget
from strategies.step.live_storages import LiveStorages
from strategies.step.position import Position

BEFORE = "over the budget without a word"
RIGHT = "within the budget, or refused with the number of calls"


def answer() -> str:
    """Run four forwards, then four backwards, twice, and compare the second peak with the budget."""
    budget = Budget(layers_fqn="layers", fraction=0.8)
    model = budget.apply(_decoder())
    batches = [torch.randint(0, 64, (2, 16)) for _ in range(4)]
    live = LiveStorages(Position(), device="cpu")
    try:
        _step(model, batches)
        with live:
            live.add_standing([*model.parameters(), *batches])
            _step(model, batches)
    except StrategyError as error:
        return RIGHT if "2 calls of the model" in str(error) else f"refused: {error}"
    plan = budget.observe(model).plan
    assert plan is not None
    return BEFORE if live.ledger.peak(lambda _: True).nbytes > plan["budget_bytes"] else RIGHT


def _step(model: nn.Module, batches: list[torch.Tensor]) -> None:
    model.zero_grad()
    for loss in [model(batch).square().mean() for batch in batches]:
        loss.backward()


def _decoder() -> nn.Module:
    return LlamaSpec(
        name="tiny",
        layers_fqn="layers",
        vocab_size=64,
        dropout=0.0,
        n_layers=4,
        width=32,
        n_heads=4,
        n_kv_heads=2,
        hidden_width=64,
        max_positions=64,
        rope_theta=10000.0,
        tied_head=False,
    ).build()
