from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.errors import ConfigError
from harness.models import Batch, LanguageModelSpec, ModelSpec
from harness.models.parts.context_attention import ContextAttention, Ring
from harness.models.parts.huggingface import _attention_over_parts, make_config

MakeSpec = Callable[..., ModelSpec]

LLAMA: dict[str, Any] = {
    "config_class": "LlamaConfig",
    "layers_fqn": "model.layers",
    "overrides": {"intermediate_size": 96, "num_key_value_heads": 2},
}


def config_of(
    config_class: str,
    overrides: dict[str, Any],
    *,
    dropout: float | None = None,
    vocab_size: int = 256,
    **sizes: int,
) -> Any:
    return make_config(config_class, overrides, sizes=sizes | {"vocab_size": vocab_size}, dropout=dropout)


def test_native_names_win_over_general_ones() -> None:
    config = config_of("GPT2Config", {"num_hidden_layers": 2, "n_layer": 3, "hidden_size": 64})
    assert (config.n_layer, config.n_embd, config.use_cache) == (3, 64, False)


def test_overrides_win_over_sizes() -> None:
    config = config_of("GPT2Config", {"n_layer": 3}, n_layers=2, width=64, n_heads=2)
    assert (config.n_layer, config.n_embd, config.n_head) == (3, 64, 2)
    config = config_of("LlamaConfig", {"hidden_size": 96}, n_layers=2, width=64, n_heads=2)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 96, 2)


def test_a_size_left_open_is_the_classs_own() -> None:
    config = config_of("GPT2Config", {})
    assert (config.n_layer, config.n_embd, config.n_head) == (12, 768, 12)


KEY_VALUE_HEADS: dict[str, tuple[str, dict[str, int], int | None, int]] = {
    "no more than heads": ("Qwen2Config", {}, 4, 4),
    "as many as heads where the class says so": ("LlamaConfig", {}, 64, 64),
    "the class's own where it divides the heads": ("MixtralConfig", {}, 16, 8),
    "fewer where it does not": ("MixtralConfig", {}, 12, 6),
    "as the overrides say": ("Qwen2Config", {"num_key_value_heads": 2}, 4, 2),
    "of heads in the overrides": ("Qwen2Config", {"num_attention_heads": 16}, 4, 16),
    "the class's own with its own heads": ("MixtralConfig", {}, None, 8),
}


@pytest.mark.parametrize(
    ("config_class", "overrides", "n_heads", "expected"), KEY_VALUE_HEADS.values(), ids=KEY_VALUE_HEADS
)
def test_key_value_heads_divide_the_heads(
    config_class: str, overrides: dict[str, int], n_heads: int | None, expected: int
) -> None:
    sizes = {"width": 128} if n_heads is None else {"width": 128, "n_heads": n_heads}
    assert config_of(config_class, overrides, **sizes).num_key_value_heads == expected


DEFAULT_MODELS = {
    "LlamaConfig": "model.layers",
    "Qwen2Config": "model.layers",
    "Qwen3Config": "model.layers",
    "GemmaConfig": "model.layers",
    "MixtralConfig": "model.layers",
    "GPTNeoXConfig": "gpt_neox.layers",
    "OPTConfig": "model.decoder.layers",
    "GPT2Config": "transformer.h",
}


@pytest.mark.parametrize(("config_class", "layers_fqn"), DEFAULT_MODELS.items(), ids=DEFAULT_MODELS)
def test_the_shipped_sizes_suit_every_class(
    make_spec: MakeSpec, batch: Batch, config_class: str, layers_fqn: str
) -> None:
    spec = make_spec("hf", config_class=config_class, layers_fqn=layers_fqn)
    torch.manual_seed(0)
    with torch.no_grad():
        assert spec.loss(spec.build()(*batch.inputs), batch).isfinite()


SMALL: dict[str, Any] = {"n_layers": 1, "width": 16, "n_heads": 2, "vocab_size": 64}
_SOUND = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 8, "num_mel_bins": 4}
_EXPERTS = {"intermediate_size": 16, "num_local_experts": 2}
HEADS = {
    "BertConfig": ("bert.encoder.layer", {"intermediate_size": 32}, "BertForMaskedLM", (2, 16, 64)),
    "T5Config": ("encoder.block", {"d_ff": 32, "d_kv": 8}, "T5ForConditionalGeneration", (2, 16, 64)),
    "WhisperConfig": ("model.decoder.layers", _SOUND, "WhisperForConditionalGeneration", (2, 16, 64)),
    "ViTConfig": ("vit.layers", {"image_size": 16, "patch_size": 8}, "ViTForImageClassification", (2, 2)),
    "MixtralConfig": ("model.layers", _EXPERTS, "MixtralForCausalLM", (2, 16, 64)),
}


@pytest.mark.parametrize("config_class", HEADS)
def test_every_kind_of_model_is_trained(make_spec: MakeSpec, batch: Batch, config_class: str) -> None:
    layers_fqn, overrides, name, shape = HEADS[config_class]
    spec = make_spec("hf", config_class=config_class, layers_fqn=layers_fqn, overrides=overrides, **SMALL)
    assert isinstance(spec, LanguageModelSpec)
    random = np.random.default_rng(0)
    tokens = Batch(inputs=(batch.inputs[0] % 64,), targets=batch.targets % 64)
    read = spec.arranged(tokens, random) if spec.reads_tokens() else spec.sample_batch(2, random)
    model = spec.build()
    outputs = model(*read.inputs, **read.keywords)
    spec.loss(outputs, read).backward()  # type: ignore[no-untyped-call]
    assert (type(model).__name__, tuple(outputs.logits.shape)) == (name, shape)
    blocks = model.get_submodule(layers_fqn).parameters()
    assert all(parameter.grad is not None for parameter in blocks)


@pytest.mark.parametrize(
    ("overrides", "ep", "said"),
    [
        pytest.param(
            {},
            1,
            "experts_implementation is eager, which runs in every dtype on every device; model.overrides can "
            "name another",
            id="what runs everywhere",
        ),
        pytest.param(
            {"experts_implementation": "batched_mm"},
            1,
            "experts_implementation is batched_mm; model.overrides can name another",
            id="what is asked for",
        ),
        pytest.param(
            {},
            2,
            "experts_implementation is that of mesh.ep=2; with 1 model.overrides can name another",
            id="what ranks share",
        ),
    ],
)
def test_what_was_decided_is_said(make_spec: MakeSpec, overrides: dict[str, str], ep: int, said: str) -> None:
    spec = make_spec(
        "hf", config_class="MixtralConfig", layers_fqn="model.layers", overrides=overrides, **SMALL
    )
    assert spec.remarks(ep=ep, tp=1) == (said,)
    assert spec.remarks(ep=ep, tp=2) == (said, "each of mesh.tp=2 ranks holds experts whole")


_GPT2 = (
    "vocab_size: 50257 -> 256",
    "n_embd: 768 -> 128",
    "n_layer: 12 -> 2",
    "n_head: 12 -> 4",
    "use_cache: True -> False",
    "bos_token_id: 50256 -> None",
    "eos_token_id: 50256 -> None",
)
_OWN = {"n_layers": None, "width": None, "n_heads": None}


@pytest.mark.parametrize(
    ("options", "replaced"),
    [
        pytest.param({}, _GPT2, id="the shipped sizes"),
        pytest.param({**_OWN, "vocab_size": 50257}, ("use_cache: True -> False",), id="sizes of the class"),
        pytest.param(
            {**_OWN, "overrides": {"n_layer": 3, "vocab_size": 50257}},
            ("use_cache: True -> False",),
            id="overrides",
        ),
        pytest.param(
            {**_OWN, "vocab_size": 50257, "dropout": 0.0},
            (
                "resid_pdrop: 0.1 -> 0.0",
                "embd_pdrop: 0.1 -> 0.0",
                "attn_pdrop: 0.1 -> 0.0",
                "summary_first_dropout: 0.1 -> 0.0",
                "use_cache: True -> False",
            ),
            id="dropout",
        ),
        pytest.param(
            {
                "config_class": "MixtralConfig",
                "layers_fqn": "model.layers",
                "n_heads": None,
                "n_layers": 1,
                "width": None,
                "vocab_size": 32000,
            },
            (
                "num_hidden_layers: 32 -> 1",
                "use_cache: True -> False",
                "experts_implementation: the class's own -> eager",
            ),
            id="experts",
        ),
        pytest.param(
            {
                "config_class": "Qwen2Config",
                "layers_fqn": "model.layers",
                "width": None,
                "n_layers": None,
                "vocab_size": 151936,
            },
            ("num_attention_heads: 32 -> 4", "num_key_value_heads: 32 -> 4", "use_cache: True -> False"),
            id="key-value heads",
        ),
    ],
)
def test_what_the_class_would_have_otherwise_is_said(
    make_spec: MakeSpec, options: dict[str, Any], replaced: tuple[str, ...]
) -> None:
    if "vocab_size" in options.get("overrides", {}):
        options = {**options, "vocab_size": options["overrides"]["vocab_size"]}
    assert make_spec("hf", **options).replaced(ep=1) == replaced


def test_experts_that_ranks_share_are_no_eager_ones(make_spec: MakeSpec) -> None:
    spec = make_spec("hf", config_class="MixtralConfig", layers_fqn="model.layers", **SMALL)
    assert spec.replaced(ep=2)[-1] == "experts_implementation: the class's own -> that of mesh.ep=2"


def test_a_plan_of_the_users_wins_over_the_classs(make_spec: MakeSpec) -> None:
    own = {"tp_column": ["model.layers.*.mlp.up_proj"], "tp_row": ["model.layers.*.mlp.down_proj"]}
    assert make_spec("hf", **(LLAMA | own)).tensor_parallel_plan() == {
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
    }


@pytest.mark.parametrize("changes", [{"overrides": {"vocab_size": 300}}, {"vocab_size": 300}])
def test_the_vocabulary_can_be_set_in_both_places(make_spec: MakeSpec, changes: dict[str, Any]) -> None:
    spec = make_spec("hf", **changes)
    assert isinstance(spec, LanguageModelSpec)
    assert spec.vocab_size == 300
    assert spec.build().get_parameter("lm_head.weight").shape == (300, 128)


def test_dropouts_are_the_classs_own_unless_one_is_given(make_spec: MakeSpec) -> None:
    config = config_of("GPT2Config", {"attn_pdrop": 0.3})
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.1, 0.1, 0.3)
    assert [make_spec("hf", dropout=dropout).may_drop_out() for dropout in (None, 0.0)] == [True, False]
    assert not make_spec("hf", **LLAMA).may_drop_out()


def test_dropout_reaches_every_field() -> None:
    config = config_of("GPT2Config", {}, dropout=0.25)
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.25, 0.25, 0.25)
    assert config_of("LlamaConfig", {}, dropout=0.5).attention_dropout == 0.5
    assert config_of("BertConfig", {}, dropout=0.5).hidden_dropout_prob == 0.5


def test_tokens_of_another_vocabulary_are_unset() -> None:
    config = config_of("GPT2Config", {}, vocab_size=256)
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    assert config_of("GPT2Config", {}, vocab_size=50257).bos_token_id == 50256


def test_llama_trains(make_spec: MakeSpec, batch: Batch) -> None:
    spec = make_spec("hf", **LLAMA)
    torch.manual_seed(0)
    loss = spec.loss(spec.build()(*batch.inputs), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()


def test_llama_brings_its_tensor_parallel_plan(make_spec: MakeSpec) -> None:
    spec = make_spec("hf", **LLAMA)
    assert spec.tensor_parallel_plan() == {
        "model.layers.*.self_attn.q_proj": "column",
        "model.layers.*.self_attn.k_proj": "column",
        "model.layers.*.self_attn.v_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
    }
    spec.check(sequence_length=16, tp=2)


def test_experts_stay_whole_in_the_plan_of_a_mixture(make_spec: MakeSpec) -> None:
    attention = {f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"}
    plan = make_spec("hf", **(LLAMA | {"config_class": "MixtralConfig"})).tensor_parallel_plan()
    assert plan == {**attention, "model.layers.*.self_attn.o_proj": "row"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"config_class": "GTP2Config"},
            "model.config_class: must be a configuration class of transformers, such as GPT2Config, "
            "got 'GTP2Config'",
            id="an unknown class",
        ),
        pytest.param(
            {"config_class": "GPT2Model"},
            "model.config_class: must be a configuration class of transformers, such as GPT2Config, "
            "got 'GPT2Model'",
            id="a class that is no configuration",
        ),
        pytest.param(
            {"overrides": {"resid_pdrop": 0.1}, "dropout": 0.0},
            "model.overrides.resid_pdrop: every dropout of the model is set by model.dropout=0.0; set that, "
            "or leave it at null",
            id="a dropout in the overrides",
        ),
        pytest.param(
            {"overrides": {"dtype": "bfloat16"}},
            "model.overrides.dtype: is not read when a model is made; give dtype, such as dtype=bf16",
            id="a dtype in the overrides",
        ),
        pytest.param(
            {"overrides": {"hidden_size": 130, "n_head": 4}},
            "model.overrides: GPT2LMHeadModel refuses them: `embed_dim` must be divisible by num_heads "
            "(got `embed_dim`: 130 and `num_heads`: 4).",
            id="heads that do not divide the width",
        ),
        pytest.param(
            {"config_class": "MambaConfig"},
            "model.n_heads: MambaConfig has no num_attention_heads, got 4; set it to null",
            id="heads for a model without",
        ),
        pytest.param({"n_layers": 0}, "model.n_layers: must be at least 1, got 0", id="no layers"),
        pytest.param(
            {"overrides": {"n_layer": "three"}},
            "model.overrides: GPT2Config refuses them: Validation error for field 'n_layer': "
            "TypeError: Field 'n_layer' expected int, got str (value: 'three')",
            id="a value of another type",
        ),
        pytest.param(
            {"config_class": "Wav2Vec2Config"},
            "model.config_class: must be of a model with one of the heads causal, masked, seq2seq, speech, "
            "image, got Wav2Vec2Config; use another, such as GPT2Config",
            id="a model without a head that is known",
        ),
        pytest.param(
            {"head": "seq2seq"},
            "model.head: must be one of causal for GPT2Config, got 'seq2seq'",
            id="a head that the class has not",
        ),
        pytest.param(
            {"layers_fqn": "layers"},
            "model.layers_fqn: must name a ModuleList, ModuleDict or Sequential of GPT2LMHeadModel, "
            "got 'layers'; containers here: transformer.h",
            id="blocks elsewhere",
        ),
    ],
)
def test_building_refuses(make_spec: MakeSpec, changes: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError) as refusal:
        make_spec("hf", **changes).build()
    assert str(refusal.value) == message


def test_dropout_for_a_model_without() -> None:
    with pytest.raises(ConfigError) as refusal:
        config_of("MambaConfig", {}, dropout=0.1)
    assert str(refusal.value) == "model.dropout: must be 0, because MambaConfig has no dropout field, got 0.1"


def test_an_unknown_override_lists_the_fields(make_spec: MakeSpec) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec("hf", overrides={"n_layers": 3}).build()
    message = str(refusal.value)
    assert message.startswith(
        "model.overrides.n_layers: GPT2Config has no such field; did you mean 'n_layer'? its own: "
    )
    assert ", n_layer, " in message


def test_a_field_without_a_default_that_the_model_reads() -> None:
    assert config_of("Qwen3MoeConfig", {"head_dim": 16}).head_dim == 16
    with pytest.raises(ConfigError, match="has no such field"):
        config_of("Qwen3MoeConfig", {"head_dims": 16})


def test_one_vocabulary_only(make_spec: MakeSpec) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec("hf", vocab_size=512, overrides={"vocab_size": 256})
    message = "model.vocab_size: must be 256, as in model.overrides, got 512; set one of them"
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        pytest.param(
            {"overrides": LLAMA["overrides"] | {"num_key_value_heads": 4}},
            8,
            "mesh.tp: must divide model.n_heads, 4, got 8",
            id="ranks do not divide the heads",
        ),
        pytest.param(
            {},
            4,
            "mesh.tp: must divide model.overrides.num_key_value_heads, 2, got 4",
            id="nor the key-value heads",
        ),
        pytest.param(
            {"config_class": "Glm4MoeLiteConfig"},
            2,
            "mesh.tp: the tensor parallel plan of Glm4MoeLiteConfig wants 'mla_kv_a_proj' for "
            "'layers.*.self_attn.kv_a_proj_with_mqa', which is not supported; name linears with "
            "model.tp_column and model.tp_row, or use 1 without its options",
            id="a plan with a way that nobody here has",
        ),
    ],
)
def test_check_refuses(make_spec: MakeSpec, changes: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec("hf", **(LLAMA | changes)).check(sequence_length=16, tp=tp)
    assert str(refusal.value) == message


_LLAMA_INSTEAD = "use 1 without its options, or a class such as LlamaConfig"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"config_class": "BertConfig", "head": "masked"},
            "mesh.cp: needs a causal head, and that of BertConfig is 'masked'; use 1 without its options",
            id="a head that sees later tokens",
        ),
        pytest.param(
            {"config_class": "BloomConfig"},
            "mesh.cp: BloomForCausalLM calls no attention of transformers' interface that parts could take "
            f"over; {_LLAMA_INSTEAD}",
            id="attention of its own",
        ),
        pytest.param(
            {"config_class": "MistralConfig", "overrides": {"sliding_window": 8}},
            "mesh.cp: needs attention over the whole sequence, and that of MistralConfig sees 8 tokens; use "
            "1 without its options, or model.overrides.sliding_window=16",
            id="a window shorter than the sequence",
        ),
        pytest.param(
            {"config_class": "Lfm2Config", "overrides": {"layer_types": ["conv", "full_attention"]}},
            "mesh.cp: Lfm2Config has layers of conv, which mix tokens without full attention; "
            f"{_LLAMA_INSTEAD}",
            id="layers that mix tokens otherwise",
        ),
    ],
)
def test_parts_of_sequences_are_refused(make_spec: MakeSpec, changes: dict[str, Any], message: str) -> None:
    spec = make_spec("hf", **({"layers_fqn": "model.layers", "n_heads": 4} | changes))
    with pytest.raises(ConfigError) as refusal:
        spec.check_context(sequence_length=16, cp=2, cp_method="gather", tp=1)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("option", "message"),
    [
        pytest.param(
            "sp",
            "mesh.sp: GPT2Config has no plan for it: 'transformer.h.*.attn' is a GPT2Attention, which is no "
            "norm and is not split; use false",
            id="blocks that nobody splits",
        ),
        pytest.param(
            "loss_parallel",
            "mesh.loss_parallel: needs a head with a weight of its own, which GPT2Config does not ask for; "
            "use false, or model.overrides.tie_word_embeddings=false",
            id="a tied head",
        ),
    ],
)
def test_parts_of_residual_and_logits_are_refused(make_spec: MakeSpec, option: str, message: str) -> None:
    spec = make_spec("hf", config_class="GPT2Config", layers_fqn="transformer.h")
    with pytest.raises(ConfigError) as refusal:
        spec.split_plan(**{"sp": False, "loss_parallel": False, option: True})
    assert str(refusal.value) == message


def test_attention_over_parts_refuses_weights_that_no_part_knows() -> None:
    module = nn.Module()
    module.attend = ContextAttention(method="gather", ring=Ring(None, 2, 0))  # type: ignore[assignment,arg-type]
    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ConfigError) as refusal:
        _attention_over_parts(module, heads, heads, heads, None, softcap=30.0, sliding_window=4)
    assert str(refusal.value) == (
        f"mesh.cp: Module weighs tokens by softcap, sliding_window, which no part knows; {_LLAMA_INSTEAD}"
    )


def test_a_missing_transformers_names_the_extra(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "harness.models.parts.huggingface", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as refusal:
        make_spec("hf").build()
    message = "model=hf: needs the package 'transformers'; install it with: pip install 'acbench[hf]'"
    assert str(refusal.value) == message
