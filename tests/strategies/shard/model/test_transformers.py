"""A Llama of `transformers`: grouped heads that its own code repeats, and norms that it writes itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from harness.models.hf import HFSpec
from strategies.estimate.machine import A100
from strategies.shard.candidate import OneCandidate
from strategies.shard.megatron import Megatron
from strategies.shard.model.graph import ModelGraph, TensorAxis
from strategies.shard.model.graph_building import model_graph

_SPEC = HFSpec(
    name="hf",
    layers_fqn="model.layers",
    vocab_size=64,
    dropout=0.0,
    config_class="LlamaConfig",
    n_layers=1,
    width=32,
    n_heads=4,
    overrides={"intermediate_size": 64, "num_key_value_heads": 2},
)
_COLUMN, _ROW, _WHOLE = "RS0 = RR x RS0", "RR = RS0 x S0R", "RR = RR x RR"
_CANDIDATES = {
    "model.embed_tokens": "replicated",
    "model.layers.0.self_attn.q_proj": _COLUMN,
    "model.layers.0.self_attn.k_proj": _COLUMN,
    "model.layers.0.self_attn.v_proj": _COLUMN,
    "model.layers.0.self_attn.o_proj": _ROW,
    "model.layers.0.mlp.gate_proj": _COLUMN,
    "model.layers.0.mlp.up_proj": _COLUMN,
    "model.layers.0.mlp.down_proj": _ROW,
    "lm_head": _WHOLE,
}


def _axis() -> TensorAxis:
    return TensorAxis(ranks=2, splits=_SPEC.tensor_parallel_plan())


def _model(attention: str) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device("meta"):
        model: Any = _SPEC.build().train()
        model.config._attn_implementation = attention
        return model, (torch.zeros((4, 8), dtype=torch.int64),)


@cache
def _graph() -> ModelGraph:
    return model_graph(*_model("sdpa"), _axis(), A100)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_grouped_heads_are_split(attention: str) -> None:
    written = Megatron().plan(*_model(attention), _axis()).as_json()
    assert written["candidates"] == _CANDIDATES


def test_norms_take_rows() -> None:
    """They are seen through; the gradient of their weight is summed where it is read."""
    weights = [node for node in _graph().nodes if node.parameter is not None]
    assert [node.parameter for node in weights] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert {str(option.output) for node in weights for option in node.options} == {"R", "R*"}


def test_linears_run_on_rows() -> None:
    strategy = OneCandidate(candidate="S0R = S0R x RR_0", modules="*mlp*")
    written = strategy.plan(*_model("sdpa"), _axis()).as_json()["candidates"]
    assert {fqn for fqn, name in written.items() if name == "S0R = S0R x RR_0"} == {
        f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    }
