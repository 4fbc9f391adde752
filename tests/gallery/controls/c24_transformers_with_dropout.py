"""transformers, GPT-2 with its dropout and its own gradient checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH


def make() -> Any:
    config = GPT2Config(n_layer=2, n_embd=WIDTH, n_head=2, n_positions=8, vocab_size=16, use_cache=False)
    return GPT2LMHeadModel(config)


def variant(model: Any) -> Any:
    model.activation_checkpointing_enable()
    return model


tokens = torch.arange(16).view(2, 8)


CASE = Case(
    make=make,
    batch={"input_ids": tokens, "labels": tokens},
    variant=variant,
    like=61,
    why="It saves the RNG state unless told otherwise.",
    needs="transformers",
)
