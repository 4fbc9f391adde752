"""A GRU and a packed LSTM in blocks of ac=offload, gradients against those of the plain model.

Found in a copy of the model of https://github.com/pytorch/pytorch/issues/47439: parts of one storage that
count their own writes were given the host copy that was made for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from strategies.ac.offload import Offload
from tests.gallery.outside._gradients import relative_error

BEFORE = "GRU 0.93, packed LSTM 1.7"
RIGHT = "GRU 0, packed LSTM 0"


class Recurrent(nn.Module):
    """Two recurrent blocks."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(layer(6, 6, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the second block makes, of padded rows for a GRU and of packed ones for an LSTM."""
        is_packed = isinstance(self.blocks[0], nn.LSTM)
        rows: Any = pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True) if is_packed else x
        for block in self.blocks:
            rows = block(rows)[0]
        values: Tensor = rows.data if is_packed else rows
        return values


def answer() -> str:
    """Return the relative errors of the worst gradients."""
    x, offload = torch.sin(torch.arange(90.0)).view(3, 5, 6), Offload(layers_fqn="blocks")
    gru, lstm = (relative_error(Recurrent(layer), (x,), offload.apply) for layer in (nn.GRU, nn.LSTM))
    return f"GRU {gru}, packed LSTM {lstm}"
