"""Written files in settings other than those that they were made in: neutral, as predicted, and saving.

Of each of six models three files are written, at fp32, without dropout, with the attention kernel of the
machine: the first half of the blocks runs again; rules keep half of what they can; rules keep all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.trials import experiments
from harness.models.parts.given_inputs import given_inputs, seeded
from strategies.budget.eager import first_call
from strategies.budget.export import operator_modules
from strategies.regions import blocks
from strategies.written.file_text import recomputing_file, rules_file
from strategies.written.heavy_operators import rules_for
from tests.covering import matrix
from tests.matrix import file_models
from tests.matrix.facts import Run
from tests.matrix.predicted import findings, problem
from tests.strategies.written.written_toys import loaded

MODELS = ("gpt", "vit", "multimodal", "encoder_decoder", "unet", "llama")
FILES = ("first", "half", "all")
SETTINGS: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]]]] = {
    "fp32": ({}, nullcontext),
    "bf16": ({}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "dropout": ({"dropout": 0.1}, nullcontext),
    "math": ({"kernel": "math"}, nullcontext),
}
TRIALS = {
    "fp32": (),
    "bf16_mixed": ("dtype=bf16_mixed",),
    "dropout": ("model.dropout=0.1",),
    "math": ("model.kwargs={kernel: math}",),
    "shard2": ("mesh=shard2",),
}
USUAL = ("protocol=parity", "protocol.parity_steps=2", "model=python", "model.layers_fqn=blocks")


@cache
def text_of(model: str, file: str) -> str:
    """Return a file of a model: `first`, `half` or `all`."""
    with seeded(0):
        module, given, loss_fn = getattr(file_models, model)()
    batch = given_inputs(module, given, loss_fn).example
    assert batch is not None
    header = {"title": f"{file} of {model}.", "name": f"apply_{model}_{file}"}
    found = blocks.find_blocks(module, layers_fqn="blocks", module_classes=())
    if file == "first":
        return recomputing_file(list(found)[: len(found) // 2 + 1], **header)
    step = first_call.shadow_step(module, batch.inputs, dict(batch.keywords))
    operators = operator_modules.heavy_operators(step, {fqn: step.model.get_submodule(fqn) for fqn in found})
    kept = [each.result_bytes for of_block in operators.values() for each in of_block if each.can_be_kept]
    return rules_file(rules_for(operators, sum(kept) / 2 if file == "half" else math.inf), **header)


@pytest.mark.parametrize(("model", "setting", "file"), matrix([*product(MODELS, SETTINGS, FILES)]))
def test_gradients_and_random_numbers_are_those_of_the_plain_model(
    model: str, setting: str, file: str
) -> None:
    options, around = SETTINGS[setting]
    found: list[list[Tensor]] = []
    for apply in (lambda module: module, loaded(text_of(model, file))["apply"]):
        torch.manual_seed(0)
        module, inputs, loss_fn = getattr(file_models, model)(**options)
        module = apply(module)
        for _ in range(2):
            with around():
                loss = loss_fn(module(**inputs) if isinstance(inputs, dict) else module(*inputs))
            loss.backward()
        found.append([loss, torch.get_rng_state(), *(each.grad for each in module.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("setting", TRIALS)
def test_a_trial_is_neutral_as_predicted_and_saves_or_is_refused(
    run: Run, tmp_path: Path, setting: str, model: str
) -> None:
    factory, points = f"model.factory=tests.matrix.file_models:{model}", []
    for file in FILES:
        path = tmp_path / f"apply_{file}.py"
        path.write_text(text_of(model, file), encoding="utf-8")
        points.append([*USUAL, factory, "ac=file", f"ac.path={path}", *TRIALS[setting]])
    for predicted, measured in findings(experiments(points), run):
        assert problem(predicted, measured) is None
        if measured.memory is not None:
            assert measured.memory.baseline is not None
            assert measured.verdict == "neutral", measured.reason
            assert measured.memory.saved_bytes < measured.memory.baseline.saved_bytes
