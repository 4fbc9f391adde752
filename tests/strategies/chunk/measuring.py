"""What a pass of a model holds, by the project's own meter: storages that forward and backward make."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.measure.memory.locator import Locator
from harness.measure.memory.totals import mark_backward, mark_forward
from strategies.step.ledger import is_activation
from strategies.step.live_storages import LiveStorages


def forward_peak_bytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    with torch.no_grad():
        return _peak_bytes(model, inputs, with_backward=False)


def training_peak_bytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    peak = _peak_bytes(model, inputs, with_backward=True)
    model.zero_grad()
    return peak


def loss_of(outputs: Any) -> Tensor:
    """Return a number that depends on each element differently."""
    parts = [leaf.square().mean() if leaf.dim() else leaf for leaf in tree_leaves(outputs)]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def _peak_bytes(model: nn.Module, inputs: tuple[Tensor, ...], *, with_backward: bool) -> int:
    locator = Locator(model, {})
    live = LiveStorages(locator, device="cpu")
    gc.collect()
    with locator, live:
        live.add_standing([*model.parameters(), *model.buffers(), *inputs])
        outputs = model(*inputs)
        if with_backward:
            loss = loss_of(outputs)
            del outputs
            mark_forward(live, model, loss)
            locator.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            mark_backward(live, model)
        return live.ledger.peak(is_activation).nbytes
