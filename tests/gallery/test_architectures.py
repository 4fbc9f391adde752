"""The command says of architectures of `transformers` that every variant is neutral, sharded too."""

from __future__ import annotations

import pytest

from tests.gallery.users.command import records, said

_NARROW = "intermediate_size: 64"
_VARIANTS = "ac=none,full,selective_layer,selective_op,nested,offload"
_SIZES = ("batch_size=2", "model.width=32", "model.n_heads=4", "protocol.parity_steps=2")


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["single", "shard2"])
@pytest.mark.parametrize(
    ("config_class", "layers_fqn", "sizes"),
    [
        ("LlamaConfig", "model.layers", _NARROW),
        ("MistralConfig", "model.layers", _NARROW),
        ("Qwen3Config", "model.layers", f"{_NARROW}, head_dim: 8"),
        ("Gemma2Config", "model.layers", f"{_NARROW}, head_dim: 8"),
        ("MixtralConfig", "model.layers", f"{_NARROW}, num_local_experts: 4"),
        ("GPT2Config", "transformer.h", ""),
        ("OPTConfig", "model.decoder.layers", "ffn_dim: 64, word_embed_proj_dim: 32"),
        ("BertConfig", "bert.encoder.layer", _NARROW),
        ("T5Config", "encoder.block", "d_ff: 64, d_kv: 8"),
        ("ViTConfig", "vit.layers", f"{_NARROW}, image_size: 32, patch_size: 8"),
    ],
)
def test_every_variant_is_neutral(config_class: str, layers_fqn: str, sizes: str, mesh: str) -> None:
    pytest.importorskip("transformers")
    found = records(
        *("model=hf", f"model.config_class={config_class}", f"model.layers_fqn={layers_fqn}"),
        *(f"model.overrides={{{sizes}}}", *_SIZES, _VARIANTS, f"mesh={mesh}"),
        *(() if "image_size" in sizes else ("sequence_length=16",)),
    )
    answers = {record["experiment"]["ac"]["name"]: said(record) for record in found}
    assert len(answers) == len(_VARIANTS.split(","))
    assert {name: each for name, each in answers.items() if each.verdict != "neutral"} == {}
