"""transformers, GPT-2 with its dropout and its own gradient checkpointing."""

from __future__ import annotations

from typing import Any

from tests.gallery.case import Case
from tests.gallery.defects.n61_transformers_without_saved_rng import make, tokens


def variant(model: Any) -> Any:
    model.activation_checkpointing_enable()
    return model


CASE = Case(
    make=make,
    batch={"input_ids": tokens, "labels": tokens},
    variant=variant,
    like=61,
    why="It saves the RNG state unless told otherwise.",
    needs="transformers",
)
