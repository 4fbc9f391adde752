"""Written files of six models in other settings: what one process runs of `bench.budget --part files`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import file_models
from bench.budget.files import FILES, MODELS, Finding, text_of
from tests.covering import matrix
from tests.strategies.written.written_toys import loaded

SETTINGS: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]]]] = {
    "fp32": ({}, nullcontext),
    "bf16": ({}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "dropout": ({"dropout": 0.1}, nullcontext),
    "math": ({"kernel": "math"}, nullcontext),
}
TEXTS: dict[tuple[str, str], str] = {}


@pytest.mark.parametrize(("model", "setting", "file"), matrix([*product(MODELS, SETTINGS, FILES)]))
def test_gradients_and_random_numbers_are_those_of_the_plain_model(
    model: str, setting: str, file: str
) -> None:
    text = TEXTS.setdefault((model, file), text_of(model, file))
    options, around = SETTINGS[setting]
    found: list[list[Tensor]] = []
    for apply in (lambda module: module, loaded(text)["apply"]):
        torch.manual_seed(0)
        module, inputs, loss_fn = getattr(file_models, model)(**options)
        module = apply(module)
        for _ in range(2):
            with around():
                loss = loss_fn(module(**inputs) if isinstance(inputs, dict) else module(*inputs))
            loss.backward()
        found.append([loss, torch.get_rng_state(), *(each.grad for each in module.parameters())])
    assert all(map(torch.equal, *found))


HOLDS: dict[str, tuple[dict[str, Any], bool]] = {
    "neutral and saving": ({"verdict": "neutral", "mispredicted": (), "saved_bytes": 1}, True),
    "refused": ({"verdict": "refused"}, True),
    "predicted otherwise": ({"verdict": "neutral", "mispredicted": ("peak_bytes",), "saved_bytes": 1}, False),
    "saving nothing": ({"verdict": "neutral", "mispredicted": (), "saved_bytes": 2}, False),
    "different": ({"verdict": "differs", "mispredicted": (), "saved_bytes": 1}, False),
}


@pytest.mark.parametrize(("fields", "holds"), HOLDS.values(), ids=HOLDS)
def test_what_holds(fields: dict[str, Any], holds: bool) -> None:
    assert Finding(model="gpt", setting="fp32", file="all", plain_saved_bytes=2, **fields).holds is holds
