"""transformers, GPT-2 in eval mode, where gradient checkpointing is off."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH


def make() -> Any:
    config = GPT2Config(n_layer=2, n_embd=WIDTH, n_head=2, n_positions=8, vocab_size=16, use_cache=False)
    return GPT2LMHeadModel(config).eval()


def variant(model: Any) -> Any:
    model.activation_checkpointing_enable()
    return model


tokens = torch.arange(16).view(2, 8)


CASE = Case(
    make=make,
    batch={"input_ids": tokens, "labels": tokens},
    variant=variant,
    verdict="inert",
    evidence=Evidence(parts=()),
    names=("nothing", "inert", "saved"),
    needs="transformers",
    why="Its layers ask `self.gradient_checkpointing and self.training`.",
    fix="Call model.train() with dropout at 0.",
)
