"""Tensor parallel plans that do not fit a model are refused; what others compute is in tests/parity."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import ConfigError
from harness.models.base import Batch, ModelSpec
from harness.models.hf import HFSpec
from harness.trial.split_check import check_split
from tests.parity import split_models
from tests.strategies.shard.models import Tied

_RUNS = (
    "mesh.tp: the code of the model does not run on the shards of its tensor parallel plan, RuntimeError: "
)
_PAIRS = (
    "; split linears in pairs, column before row, and by whole heads, or use mesh.tp=1 without its options"
)
_GPT2 = {"tp_column": ("transformer.h.*.mlp.c_fc",), "tp_row": ("transformer.h.*.mlp.c_proj",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(ModelSpec):
    """A model of a program that brings its own plan."""

    model: Callable[[], nn.Module]
    plan: Mapping[str, Any]

    def build(self) -> nn.Module:
        return self.model()

    def tensor_parallel_plan(self) -> dict[str, str]:
        return dict(self.plan)


def _planned(model: Callable[[], nn.Module], **plan: Any) -> Planned:
    plan = {fqn.replace("__", "."): style for fqn, style in plan.items()}
    return Planned(name="planned", layers_fqn="", dropout=0.0, model=model, plan=plan)


def _hf(config_class: str, layers_fqn: str, **options: Any) -> HFSpec:
    overrides = options.pop("overrides", None)
    return HFSpec(
        name="hf", layers_fqn=layers_fqn, vocab_size=64, dropout=0.0, config_class=config_class, n_layers=1,
        width=32, n_heads=4, overrides=overrides, **options,
    )  # fmt: skip


def _check(spec: ModelSpec) -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64, device="meta")
    check_split(spec, Batch(inputs=(tokens,), targets=None), 2)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(split_models.spec("Split"), id="column and row"),
        pytest.param(split_models.spec("FusedQueries"), id="wrong, which shapes do not show"),
        pytest.param(split_models.spec("NormOfHeads", tp_summed=("layers.*",)), id="summed"),
        pytest.param(_planned(Tied, embedding="summed"), id="a tied weight that stays whole"),
        pytest.param(
            _hf("Qwen3Config", "model.layers", overrides={"intermediate_size": 64, "head_dim": 8}),
            id="Qwen3's own, with norms of heads",
        ),
        pytest.param(
            _hf("Olmo2Config", "model.layers", overrides={"intermediate_size": 64}),
            id="Olmo 2's own, which gathers queries and keys for its norms",
        ),
    ],
)
def test_what_fits_is_accepted(spec: ModelSpec) -> None:
    _check(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            split_models.spec("Split", tp_column=("blocks.*.up",)),
            "model.tp_column: 'blocks.*.up' names no module of the model; a star stands for one name",
            id="a pattern that names nothing",
        ),
        pytest.param(
            _planned(Tied, layers="column"),
            "mesh.tp: the tensor parallel plan of 'planned' names no module; use mesh.tp=1 without its "
            "options",
            id="a plan of another model",
        ),
        pytest.param(
            _hf("GPT2Config", "transformer.h", **_GPT2),
            "model.tp_column: 'transformer.h.0.mlp.c_fc' is a Conv1D, and torch splits nn.Linear and "
            "nn.Embedding alone; leave it out, or use mesh.tp=1 without its options",
            id="GPT-2, whose weights are transposed",
        ),
        pytest.param(
            split_models.spec("Split", tp_row=("layers.*",)),
            "model.tp_row: 'layers.0' is a Split, and torch splits nn.Linear and nn.Embedding alone; "
            "leave it out, or use mesh.tp=1 without its options",
            id="a block",
        ),
        pytest.param(
            split_models.spec("Uneven"),
            "mesh.tp: must divide the 33 output features of 'layers.0.up', got 2",
            id="features that do not divide",
        ),
        pytest.param(
            split_models.spec("Uneven", tp_column=()),
            "mesh.tp: must divide the 33 input features of 'layers.0.down', got 2",
            id="input features that do not divide",
        ),
        pytest.param(
            split_models.spec("ThreeHeads"),
            _RUNS
            + "unflatten: Provided sizes [-1, 12] don't multiply up to the size of dim 2 (18) in the input "
            "tensor (split_models.py, line 0, in between)" + _PAIRS,
            id="heads that do not divide",
        ),
        pytest.param(
            split_models.spec("Split", tp_row=()),
            _RUNS + "a and b must have same reduction dim, but got [12, 16] X [32, 16]. (split_models.py, "
            "line 0, in forward)" + _PAIRS,
            id="column without row",
        ),
        pytest.param(
            split_models.spec("Split", tp_column=("layers.*.up", "head")),
            "mesh.tp: the tensor parallel plan makes the model return (2, 6, 16), where the whole returns "
            "(2, 6, 32); logits in parts need a plan of the model's own: leave the head out of "
            "model.tp_column",
            id="a head whose logits nobody gathers",
        ),
        pytest.param(
            _planned(Tied, head="column_gathered"),
            "mesh.tp: 'head' shares its weight with 'embedding', and splitting one unties them; leave it "
            "out, or give it a weight of its own",
            id="a tied head",
        ),
        pytest.param(
            _planned(Tied, blocks__0__norm=torch.distributed.tensor.parallel.SequenceParallel()),
            "mesh.tp: the tensor parallel plan of model 'planned' wants SequenceParallel for "
            "'blocks.0.norm', which is none of column, row, summed, column_gathered, row_scattered; "
            "shard=cheapest places norms and sequences by itself",
            id="sequence parallel",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _check(spec)
    assert re.sub(r"line \d+", "line 0", str(refusal.value)) == message


def test_a_forward_that_needs_numbers_is_not_asked() -> None:
    class Reads(Tied):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * tokens.sum().item()

    _check(_planned(Reads, blocks__0__up="column"))
