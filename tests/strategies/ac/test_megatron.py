"""megatron: labels mean the same parts in models of ours and of transformers; others are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from strategies import StrategyError
from strategies.ac.megatron import Megatron
from strategies.ac.modules import Modules
from strategies.regions.blocks import AbsentBlock
from tests.parity.cases import MODELS
from tests.strategies.meters import Measured, measure

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
TOKENS = torch.arange(64).view(4, 16)
D = 64 * 32 * 4
"""Bytes of the residual stream."""


class Logits(nn.Module):
    """The logits of a model of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Any) -> Any:
        return self.model(tokens).logits


def _of_ours(name: str) -> nn.Module:
    return replace(MODELS[name], dropout=0.1).build()


def _of_transformers(config: str, **more: Any) -> nn.Module:
    return Logits(getattr(transformers, config)(**{**_SIZES, **more}))


MADE = {
    "llama": (partial(_of_ours, "llama"), "layers"),
    "moe": (partial(_of_ours, "moe"), "layers"),
    "qwen3": (partial(_of_transformers, "Qwen3Config", head_dim=8), "model.model.layers"),
    "olmoe": (
        partial(_of_transformers, "OlmoeConfig", num_experts=4, num_experts_per_tok=2),
        "model.model.layers",
    ),
    "deepseek": (partial(_of_transformers, "DeepseekV3Config", **_LATENT), "model.model.layers"),
}


def trained(name: str, *labels: str) -> tuple[list[torch.Tensor], Measured]:
    make, layers = MADE[name]
    torch.manual_seed(0)
    model = make().train()
    if labels:
        Megatron(layers_fqn=layers, modules=labels).apply(model)
    torch.manual_seed(1)
    loss = model(TOKENS).square().mean()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, torch.get_rng_state()], measure(model, TOKENS)


# freed bytes of two blocks of 64 tokens, width D; hidden 2 D, keys and values D / 2
LLAMA = {
    # rotated queries and keys, their halves' products saved nowhere; scores of 4 heads and their dropout
    ("core_attn",): 114_688,
    # of two norms in each block: deviations, what they normalise, results
    ("layernorm",): 2 * 2 * (2 * D + 64 * 4),
    # gate, up, silu and their product
    ("mlp",): 2 * 4 * 2 * D,
    ("core_attn", "layernorm", "mlp"): 114_688 + 4 * (2 * D + 256) + 16 * D,
}
ROWS = [
    *(("llama", labels, freed) for labels, freed in LLAMA.items()),
    ("qwen3", *list(LLAMA.items())[-1]),
    # each token visits two experts: silu of it and the product
    ("moe", ("moe_act",), 2 * 2 * 2 * 2 * D),
    ("olmoe", ("moe_act",), 2 * 2 * 2 * 2 * D),
    ("moe", ("moe", "moe_act"), 368_640),
    ("olmoe", ("layernorm", "moe_act"), 4 * (2 * D + 256) + 16 * D),
    ("deepseek", ("mla_up_proj",), 117_760),
    # of the second block alone; the first is dense
    ("deepseek", ("shared_experts",), 4 * D // 2),
]


@pytest.mark.parametrize(("name", "labels", "freed"), ROWS)
def test_a_label_frees_the_same_in_every_model(name: str, labels: tuple[str, ...], freed: int) -> None:
    plain, without = trained(name)
    found, measured = trained(name, *labels)
    assert all(map(torch.equal, plain, found))
    assert without.saved_bytes - measured.saved_bytes == freed


def test_a_stage_may_lack_the_blocks_that_a_label_is_of() -> None:
    make, layers = MADE["deepseek"]
    model: Any = make()
    model.model.model.layers[1] = AbsentBlock()  # the first is dense
    assert Megatron(layers_fqn=layers, modules=("moe",)).apply(model) is model


def test_a_discarded_norm_is_that_of_names() -> None:
    torch.manual_seed(0)
    model = Modules(layers_fqn="layers", discard=("*_norm",)).apply(MADE["llama"][0]())
    assert measure(model, TOKENS) == trained("llama", "layernorm")[1]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(
            lambda: trained("llama", "core_attn", "moe_act"),
            "ac.modules: the blocks have no 'moe_act'; they have core_attn, layernorm, mlp",
            id="no experts",
        ),
        pytest.param(
            lambda: trained("moe", "mla_up_proj"),
            "ac.modules: the blocks have no 'mla_up_proj'; they have core_attn, layernorm, moe, moe_act",
            id="no latent attention",
        ),
        pytest.param(
            lambda: Megatron(modules=("core_atn",)),
            "ac.modules: must be a list of core_attn, mla_up_proj, layernorm, mlp, moe, moe_act, "
            "shared_experts, got 'core_atn'",
            id="no label",
        ),
        pytest.param(
            lambda: Megatron(modules=()),
            "ac.modules: must be a list of core_attn, mla_up_proj, layernorm, mlp, moe, moe_act, "
            "shared_experts, got ()",
            id="no labels",
        ),
        pytest.param(
            lambda: Megatron(module_classes=("Linear",)).apply(nn.Sequential(nn.Linear(2, 2))),
            "ac.modules: the blocks have no 'core_attn'; they have none of them",
            id="blocks without parts",
        ),
    ],
)
def test_refusals(act: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        act()
    assert str(error.value) == message
