"""Learned keys and values in the cache of a transformers model that checkpoints itself.

Two public reports: the library drops the cache where it checkpoints. The printed remedy was not true.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.gallery.outside._checked import checked

BEFORE = "outputs: use use_reentrant=False, and pass *args and **kwargs through"
RIGHT = "outputs: with strategies.ac.nested.Nested(layers_fqn='lm.model.layers') in its place it is neutral"

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 64,
}  # fmt: skip


class _Prefix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm: Any = LlamaForCausalLM(LlamaConfig(**_SIZES)).train().requires_grad_(requires_grad=False)
        self.prefix = nn.Parameter(torch.randn(2, 2, 4, 3, 8))

    def forward(self, input_ids: Tensor) -> Any:
        cache = DynamicCache()
        for place in range(2):
            keys, values = (each.expand(len(input_ids), -1, -1, -1) for each in self.prefix[place])
            cache.update(keys, values, place)
        return self.lm(input_ids=input_ids, labels=input_ids, past_key_values=cache).loss


def answer() -> str:
    """Return what differs, and the remedy."""
    found = checked(_Prefix, (torch.arange(16).reshape(2, 8),), _checkpoint, _itself)
    remedy = getattr(found, "remedy", "") or found.cause.rpartition("; ")[2] or "no remedy"
    return f"{found.first['part']}: {remedy}"


def _itself(loss: Tensor) -> Tensor:
    return loss


def _checkpoint(model: _Prefix) -> None:
    model.lm.activation_checkpointing_enable()
