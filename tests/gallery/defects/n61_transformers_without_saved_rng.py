"""transformers, GPT-2 with its dropout, and gradient_checkpointing_kwargs without RNG state."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH


def make() -> Any:
    config = GPT2Config(n_layer=2, n_embd=WIDTH, n_head=2, n_positions=8, vocab_size=16, use_cache=False)
    return GPT2LMHeadModel(config)


def variant(model: Any) -> Any:
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


tokens = torch.arange(16).view(2, 8)


CASE = Case(
    make=make,
    batch={"input_ids": tokens, "labels": tokens},
    variant=variant,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "rng_state"), gradients=2.7),
    names=("transformer.h", "transformer.w", "lm_head"),
    needs="transformers",
    link="https://github.com/quic/efficient-transformers/pull/522",
    why="preserve_rng_state=False: every block recomputes with other masks.",
    fix="Leave preserve_rng_state at True.",
)
