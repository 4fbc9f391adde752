"""transformers: what its own switch costs once `switch_on` has called it, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'acbench[hf]'")

from strategies import Strategy, StrategyError
from strategies.ac.full import Full
from strategies.ac.selective_layer import SelectiveLayer
from strategies.ac.transformers import Transformers
from tests.strategies.foreign.models import A_MODEL_OF_OTHERS, BLOCKS, assert_costs_the_same, llama, refusal


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(Transformers(), Full(**BLOCKS), id="all layers"),
        pytest.param(
            Transformers(every_n_layers=3), SelectiveLayer(**BLOCKS, layers=(0, 3)), id="every third layer"
        ),
        pytest.param(Transformers(use_reentrant=True), Full(**BLOCKS, use_reentrant=True), id="reentrant"),
    ],
)
def test_it_costs_what_the_same_of_ours_costs(theirs: Strategy, ours: Strategy) -> None:
    assert_costs_the_same(theirs, ours)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        A_MODEL_OF_OTHERS,
        pytest.param(
            llama,
            {"every_n_layers": 0},
            "ac.every_n_layers: must be at least 1, got 0",
            id="a number below one",
        ),
        pytest.param(
            llama,
            {"offload": True},
            "ac.offload: transformers copies to pinned memory, which raises where torch finds no "
            "accelerator; use ac=offload or ac=full ac.offload=true",
            id="offloading without an accelerator",
        ),
        pytest.param(
            lambda: Full(**BLOCKS).apply(llama()),
            {},
            "ac: 'model.layers.0' is already checkpointed; apply one variant to a model",
            id="a second application",
        ),
    ],
)
def test_refusals(make: Any, fields: dict[str, Any], message: str) -> None:
    with mock.patch.object(torch.accelerator, "is_available", return_value=False):
        assert refusal("transformers", make(), **fields) == message


def test_an_option_that_the_release_lacks_is_named() -> None:
    release = pytest.importorskip("transformers").__version__
    model: nn.Module = llama()
    model.activation_checkpointing_enable = lambda _kwargs=None: None  # type: ignore[assignment]
    with pytest.raises(StrategyError) as error:
        Transformers(every_n_layers=2).apply(model)
    assert str(error.value) == (
        f"ac.every_n_layers: transformers {release} has no such option; pip install -U transformers"
    )
