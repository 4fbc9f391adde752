"""transformers, GPT-2 with frozen embeddings and reentrant checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH


def make() -> Any:
    config = GPT2Config(n_layer=2, n_embd=WIDTH, n_head=2, n_positions=8, vocab_size=16, use_cache=False)
    model: Any = GPT2LMHeadModel(config)
    model.transformer.wte.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())
    for each in (model.transformer.wte, model.transformer.wpe):
        each.requires_grad_(requires_grad=False)
    return model


def variant(model: Any) -> Any:
    model.activation_checkpointing_enable({"use_reentrant": True})
    return model


tokens = torch.arange(16).view(2, 8)


CASE = Case(
    make=make,
    batch={"input_ids": tokens, "labels": tokens},
    variant=variant,
    like=48,
    why="Version 5 lets embedding outputs require gradients.",
    needs="transformers",
)
