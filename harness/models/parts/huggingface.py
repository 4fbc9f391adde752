"""Models of `transformers`, built from a configuration with random weights; nothing is downloaded.

This module needs the extra `acbench[hf]`; `harness.models.hf` imports it when such a model is used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from inspect import getsource, signature
from sys import modules
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
)

from harness.errors import ConfigError
from harness.models.base import Batch
from harness.models.parts import made_model
from harness.models.parts.context_attention import ContextAttention, Ring
from harness.models.parts.given_inputs import by_position
from strategies import generators
from strategies.regions.block_search import is_under

HEADS: Mapping[str, type[Any]] = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "speech": AutoModelForSpeechSeq2Seq,
    "image": AutoModelForImageClassification,
}
"""Tables of the models that have a head, by what it predicts."""

_DROPOUT_FIELD = re.compile(r"(_pdrop|dropout|dropout_prob|dropout_rate)$")
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_TOKEN_FIELD = re.compile(r"(bos|eos|pad)_token_id$")
_SIZES = {
    "n_layers": "num_hidden_layers",
    "width": "hidden_size",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_DECODER_SIZES = {"n_layers": "decoder_layers", "n_heads": "decoder_attention_heads"}
"""Fields of a decoder with an encoder, which get the same sizes."""
_EXPERTS = "experts_implementation"
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MOST_OF_A_VALUE = 40  # characters
_OVER_PARTS = "acbench_context"
"""Name of attention over parts of sequences, in the interface of `transformers`."""

_WEIGHED_OTHERWISE = ("softcap", "s_aux", "position_bias")
_IMAGE_SIZE = 224  # of configurations that leave it open
_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "summed",
    "colwise_gather_output": "column_gathered",
    "rowwise_split_input": "row_scattered",
}
"""Words of tensor parallel plans, by those of `transformers`."""

_STYLE_OF_EXPERTS = "moe_tp_experts"


def make_config(
    config_class: str,
    overrides: Mapping[str, Any],
    *,
    sizes: Mapping[str, int],
    dropout: float | None,
    head: str | None = None,
) -> PretrainedConfig:
    """Return a configuration of class `config_class`.

    Args:
        config_class: the class's name.
        overrides: its fields. A name that the class has itself (`n_layer`) wins over the general
            alias of the same field (`num_hidden_layers`).
        sizes: `n_layers`, `width`, `n_heads` or `vocab_size`, where `overrides` does not set them.
        dropout: probability of every dropout; `None` leaves each to the class and `overrides`.
        head: what the model predicts; `None` for what the class is made for.

    Raises:
        ConfigError: the class is unknown or has no such head, it has no field for an override
            or a size, an override sets what `dropout` sets, the class refuses a value, or `dropout` is
            positive and the class has no dropout.
    """
    cls = getattr(transformers, config_class, None)
    if not (isinstance(cls, type) and issubclass(cls, PretrainedConfig)):
        problem = "must be a configuration class of transformers, such as GPT2Config"
        raise ConfigError("model.config_class", f"{problem}, got {config_class!r}")
    if head_of(cls, head) == "image":
        sizes = {name: size for name, size in sizes.items() if name != "vocab_size"}
    defaults = cls()
    experts = overrides.get(_EXPERTS, "eager")
    overrides = {name: value for name, value in overrides.items() if name != _EXPERTS}
    for name in overrides:
        _require_field(defaults, name, dropout, head)
    values = _values(defaults, overrides, sizes)
    values = _divided_heads(defaults, values) | values
    try:
        config = cls(**values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError("model.overrides", f"{config_class} refuses them: {_one_line(error)}") from error
    if dropout is not None:
        _set_dropout(config, dropout)
    config.use_cache = False  # a training step reads no cache
    if _has_experts(config):
        config._experts_implementation = experts
    return config


def head_of(config_class: type[Any], head: str | None) -> str:
    """Return what a model of `config_class` predicts.

    An encoder with a decoder is one of sequences, or of speech where it reads sounds. What is no decoder by
    default and has a masked head is an encoder.

    Args:
        head: what is asked for; `None` for what the class is made for.

    Raises:
        ConfigError: no model of the class has this head, or any of those known here.
    """
    found = [name for name in HEADS if config_class in _table(name)]
    if head is not None:
        if head not in found:
            problem = f"must be one of {', '.join(found) or 'none'} for {config_class.__name__}, got {head!r}"
            raise ConfigError("model.head", problem)
        return head
    if not found:
        problem = f"must be of a model with one of the heads {', '.join(HEADS)}, got {config_class.__name__}"
        raise ConfigError("model.config_class", f"{problem}; use another, such as GPT2Config")
    defaults = config_class()
    whole = [name for name in ("speech", "seq2seq") if name in found and defaults.is_encoder_decoder]
    is_encoder = "masked" in found and not getattr(defaults, "is_decoder", False)
    return (*whole, *(["masked"] if is_encoder else []), *found)[0]


def model_class(config: PretrainedConfig, head: str | None) -> type[Any]:
    """Return the class of the model of `config`.

    Raises:
        ConfigError: `transformers` has none with that head.
    """
    found: type[Any] = _table(head_of(type(config), head))[type(config)]
    return found


def batch_of(config: PretrainedConfig, head: str | None, tokens: Batch, random: np.random.Generator) -> Batch:
    """Return a batch of tokens as the model of `config` takes them.

    An encoder reads the tokens that the decoder reads; one of speech reads random features of shape
    (B, mel bins, frames), float32.
    """
    kind = head_of(type(config), head)
    (tokens_BS,) = tokens.inputs
    if kind == "seq2seq":
        inputs = {"input_ids": tokens_BS, "decoder_input_ids": tokens_BS}
    elif kind == "speech":
        inputs = {"input_features": _features(config, len(tokens_BS), random), "decoder_input_ids": tokens_BS}
    else:
        return tokens
    return _called_with(config, head, inputs, tokens.targets)


def image_batch(config: PretrainedConfig, head: str | None, count: int, random: np.random.Generator) -> Batch:
    """Return random images, float32 of shape (B, C, Y, X), and random classes, int64 of shape (B,)."""
    size = getattr(config, "image_size", None) or _IMAGE_SIZE
    rows, columns = size if isinstance(size, list | tuple) else (size, size)
    shape = count, getattr(config, "num_channels", 3), rows, columns
    images = torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
    classes = torch.from_numpy(random.integers(config.num_labels, size=count))
    return _called_with(config, head, {"pixel_values": images}, classes)


def remarks(config: PretrainedConfig, *, ep: int, tp: int) -> tuple[str, ...]:
    """Return what was decided about the model of `config`.

    Args:
        ep: ranks that share experts.
        tp: ranks that share linears.
    """
    if not _has_experts(config):
        return ()
    held = (f"each of mesh.tp={tp} ranks holds experts whole",) if tp > 1 else ()
    if ep > 1:
        said = f"experts_implementation is that of mesh.ep={ep}; with 1 model.overrides can name another"
        return (said, *held)
    used = config._experts_implementation  # noqa: SLF001 (no public name)
    why = ", which runs in every dtype on every device" if used == "eager" else ""
    return (f"experts_implementation is {used}{why}; model.overrides can name another", *held)


def replaced(config: PretrainedConfig, overrides: Mapping[str, Any], ep: int) -> tuple[str, ...]:
    """Return the fields of `config` that the class has otherwise under the same overrides, in words.

    Args:
        overrides: those of the user.
        ep: ranks that share experts.
    """
    own = _own(type(config), {name: value for name, value in overrides.items() if name != _EXPERTS})
    before, after = own.to_dict(), config.to_dict()
    changed = [
        f"{name}: {_in_words(before.get(name))} -> {_in_words(value)}"
        for name, value in after.items()
        if before.get(name) != value
    ]
    if _has_experts(config) and _EXPERTS not in overrides:
        runs = "eager" if ep == 1 else f"that of mesh.ep={ep}"
        changed.append(f"{_EXPERTS}: the class's own -> {runs}")
    return tuple(changed)


def drops_out(config: PretrainedConfig) -> bool:
    """Return whether a dropout of `config` is positive."""
    return any(getattr(config, name) > 0 for name in _dropouts(config))


def make_model(config: PretrainedConfig, head: str | None) -> nn.Module:
    """Return the model of `config` with its own random initialisation, in training mode.

    Raises:
        ConfigError: its constructor refuses the configuration.
    """
    cls = model_class(config, head)
    try:
        model: nn.Module = cls(config)
    except (TypeError, ValueError) as error:
        raise ConfigError("model.overrides", f"{cls.__name__} refuses them: {_one_line(error)}") from error
    made_model.train(model)
    return model


def tensor_parallel_plan(config: PretrainedConfig, head: str | None) -> dict[str, str]:
    """Return the class's own plan with full FQN patterns; empty when it has none.

    Experts stay whole: all ranks of `tp` hold the same tokens, and compute the same of them.

    Raises:
        ConfigError: the plan asks for another way to split.
    """
    prefix = model_class(config, head).base_model_prefix
    plan: Mapping[str, str] = config.base_model_tp_plan or {}
    whole = [pattern for pattern, style in plan.items() if style == _STYLE_OF_EXPERTS]
    plan = {name: style for name, style in plan.items() if not any(is_under(name, each) for each in whole)}
    for pattern, style in plan.items():
        if style not in _STYLES:
            problem = f"the tensor parallel plan of {type(config).__name__} wants {style!r} for {pattern!r}"
            remedy = "name linears with model.tp_column and model.tp_row, or use 1 without its options"
            raise ConfigError("mesh.tp", f"{problem}, which is not supported; {remedy}")
    return {f"{prefix}.{pattern}": _STYLES[style] for pattern, style in plan.items()}


def sequence_plan(
    config: PretrainedConfig, head: str | None, plan: Mapping[str, str], layers_fqn: str
) -> dict[str, str]:
    """Return the styles of `mesh.sp` for a model whose linears are split by `plan`.

    The input of the first block is cut, so that embeddings and positions are those of whole sequences. In a
    block, what ends in a linear split by row reads the whole and gives a part; norms compute on parts. The
    last norm gives the whole again.

    Raises:
        ConfigError: something else in a block, or after the blocks, has parameters.
    """
    with generators.restored(), torch.device("meta"):
        model = make_model(config, head)
    blocks = f"{layers_fqn}.*."
    rows = [name.removeprefix(blocks) for name, style in plan.items() if style == "row" and blocks in name]
    branches = [name.partition(".")[0] for name in rows]
    base, _, container = layers_fqn.rpartition(".")
    block = next(model.get_submodule(layers_fqn).children())
    norms = [
        name
        for name, child in block.named_children()
        if name not in branches and any(True for _ in child.parameters())
    ]
    for name in norms:
        _require_norm(config, f"{blocks}{name}", block.get_submodule(name))
    embedded = {id(each) for each in model.modules() if isinstance(each, nn.Embedding)}
    after = [
        name
        for name, child in model.get_submodule(base).named_children()
        if name != container and id(child) not in embedded and any(True for _ in child.parameters())
    ]
    if not rows or len(set(branches)) < len(branches) or len(after) != 1:
        problem = (
            f"{type(config).__name__} has no plan for it: its blocks do not end each branch in one linear"
        )
        raise ConfigError("mesh.sp", f"{problem} that is split by row, before one last norm; use false")
    _require_norm(config, last := f"{base}.{after[0]}", model.get_submodule(last))
    return {
        f"{layers_fqn}.0": "scattered_input",
        **{f"{blocks}{name}": "gathered_input" for name in branches},
        **{f"{blocks}{name}": "row_to_sequence" for name in rows},
        **{f"{blocks}{name}": "sequence" for name in norms},
        last: "sequence_gathered",
    }


def logits_plan(config: PretrainedConfig, head: str | None) -> dict[str, str]:
    """Return the style of the head under `mesh.loss_parallel`.

    Raises:
        ConfigError: the head has no weight of its own.
    """
    with generators.restored(), torch.device("meta"):
        model: Any = make_model(config, head)
    linear = model.get_output_embeddings()
    if linear is None or linear.weight is model.get_input_embeddings().weight:
        problem = f"needs a head with a weight of its own, which {type(config).__name__} does not ask for"
        raise ConfigError(
            "mesh.loss_parallel", f"{problem}; use false, or model.overrides.tie_word_embeddings=false"
        )
    return {next(name for name, each in model.named_modules() if each is linear): "column_to_logits"}


def _require_norm(config: PretrainedConfig, name: str, module: nn.Module) -> None:
    """Refuse what may mix tokens where each rank has a part of them."""
    if not type(module).__name__.endswith("Norm"):
        problem = f"{type(config).__name__} has no plan for it: {name!r} is a {type(module).__name__}"
        raise ConfigError("mesh.sp", f"{problem}, which is no norm and is not split; use false")


def split_sizes(config: PretrainedConfig) -> dict[str, int]:
    """Return `{configuration path: size}` of the heads and hidden units that tensor parallelism divides."""
    paths = {
        "num_attention_heads": "model.n_heads",
        "num_key_value_heads": "model.overrides.num_key_value_heads",
        "intermediate_size": "model.overrides.intermediate_size",
    }
    found = {path: getattr(config, name, None) for name, path in paths.items()}
    return {path: size for path, size in found.items() if isinstance(size, int)}


def check_context(config: PretrainedConfig, head: str | None, sequence_length: int) -> None:
    """Refuse models whose tokens meet otherwise than in causal attention over all earlier ones.

    Raises:
        ConfigError: the head is not causal, the class takes no positions or no attention of others, or a
            layer reads fewer tokens, or mixes them otherwise.
    """
    name, kind = type(config).__name__, head_of(type(config), head)
    if kind != "causal":
        problem = f"needs a causal head, and that of {name} is {kind!r}"
        raise ConfigError("mesh.cp", f"{problem}; use 1 without its options")
    cls = model_class(config, head)
    if not cls._supports_attention_backend or not cls._supports_sdpa:
        problem = f"{cls.__name__} calls no attention of transformers' interface that parts could take over"
        raise ConfigError("mesh.cp", f"{problem}; use 1 without its options, or a class such as LlamaConfig")
    if "position_ids" not in signature(cls.forward).parameters:
        problem = f"{cls.__name__} takes no position_ids, so that a part would begin at position 0"
        raise ConfigError("mesh.cp", f"{problem}; use 1 without its options, or a class such as LlamaConfig")
    layers = set(getattr(config, "layer_types", None) or ())
    foreign = sorted(layers - {"full_attention", "sliding_attention"})
    if foreign:
        problem = f"{name} has layers of {', '.join(foreign)}, which mix tokens without full attention"
        raise ConfigError("mesh.cp", f"{problem}; use 1 without its options, or a class such as LlamaConfig")
    window = getattr(config, "sliding_window", None)
    if window and window < sequence_length and (not layers or "sliding_attention" in layers):
        problem = f"needs attention over the whole sequence, and that of {name} sees {window} tokens"
        remedy = f"use 1 without its options, or model.overrides.sliding_window={sequence_length}"
        raise ConfigError("mesh.cp", f"{problem}; {remedy}")


def check_experts(config: PretrainedConfig, ep: int, implementation: str | None) -> None:
    """Refuse a class without experts, a number that `ep` does not divide, and an implementation of others.

    Raises:
        ConfigError: naming the option.
    """
    counts = {name: getattr(config, name, None) for name in _EXPERT_COUNTS}
    name, count = next(((name, count) for name, count in counts.items() if count), ("", 0))
    if not count:
        problem = f"{type(config).__name__} has no experts that ranks could share, got {ep}"
        raise ConfigError("mesh.ep", f"{problem}; use 1 without its options, or a class such as OlmoeConfig")
    if count % ep:
        raise ConfigError("mesh.ep", f"must divide model.overrides.{name}, {count}, got {ep}")
    if implementation is not None:
        problem = f"has no effect with mesh.ep={ep}, which dispatches tokens, got {implementation!r}"
        remedy = "leave it out, or use mesh.ep=1 without its options"
        raise ConfigError(f"model.overrides.{_EXPERTS}", f"{problem}; {remedy}")


def attend_over(model: nn.Module, method: str, ring: Ring) -> None:
    """Let the attention of a model go over the parts of sequences that the ranks of a ring hold.

    `transformers` looks its function up at every call, so that a recomputation finds it too.
    """
    AttentionInterface.register(_OVER_PARTS, _attention_over_parts)
    for module in model.modules():
        if hasattr(module, "is_causal"):  # what every attention of the interface says of itself
            module.attend = ContextAttention(method=method, ring=ring)  # type: ignore[assignment]
    model.set_attn_implementation(_OVER_PARTS)  # type: ignore[operator]  # of PreTrainedModel


def _attention_over_parts(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output of this rank's queries, of shape (B, S, H, K), as `transformers` wants it.

    Raises:
        ConfigError: the model asks for weights of attention that nobody computes over parts.
    """
    attend: Any = module.attend
    whole = query.size(2) * attend.ring.size
    window = others.get("sliding_window")
    asked = [name for name in _WEIGHED_OTHERWISE if others.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if window is not None and window < whole:
        asked.append("sliding_window")
    if asked:
        problem = f"{type(module).__name__} weighs tokens by {', '.join(asked)}, which no part knows"
        raise ConfigError("mesh.cp", f"{problem}; use 1 without its options, or a class such as LlamaConfig")
    output = attend(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scale=scaling,
    )
    return output.transpose(1, 2).contiguous(), None


def positions(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that `config` allows, or `None` when it sets no limit."""
    longest = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
    return longest if isinstance(longest, int) else None


def _own(cls: type[Any], overrides: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration that the class makes of `overrides` alone, with its defaults for the rest."""
    try:
        made: PretrainedConfig = cls(**overrides)
    except (StrictDataclassError, TypeError, ValueError):  # they suit other sizes only
        made = cls()
        for name, value in overrides.items():
            setattr(made, name, value)
    return made


def _in_words(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_OF_A_VALUE else f"{type(value).__name__} of {len(value)}"


def _require_field(defaults: PretrainedConfig, name: str, dropout: float | None, head: str | None) -> None:
    """Refuse an override of a field that the class lacks, that nothing reads, or that is set already."""
    where = f"model.overrides.{name}"
    if not hasattr(defaults, name) and not _is_read(defaults, name, head):
        own = sorted(vars(defaults).keys() - vars(PretrainedConfig()).keys())
        close = difflib.get_close_matches(name, own, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        problem = f"{type(defaults).__name__} has no such field; {meant}its own: {', '.join(own)}"
        raise ConfigError(where, problem)
    if name in _DTYPE_FIELDS:
        raise ConfigError(where, "is not read when a model is made; give dtype, such as dtype=bf16")
    if _DROPOUT_FIELD.search(name) and dropout is not None:
        problem = (
            f"every dropout of the model is set by model.dropout={dropout}; set that, or leave it at null"
        )
        raise ConfigError(where, problem)


def _is_read(defaults: PretrainedConfig, name: str, head: str | None) -> bool:
    """Say whether the code of the model asks for a field that its configuration has no default of."""
    return f'getattr(config, "{name}",' in getsource(modules[model_class(defaults, head).__module__])


def _set_dropout(config: PretrainedConfig, dropout: float) -> None:
    """Set every dropout of a configuration."""
    fields = _dropouts(config)
    if dropout > 0 and not fields:
        problem = f"must be 0, because {type(config).__name__} has no dropout field"
        raise ConfigError("model.dropout", f"{problem}, got {dropout}")
    for name in fields:
        setattr(config, name, float(dropout))


def _dropouts(config: PretrainedConfig) -> list[str]:
    """Return the fields of a configuration that are dropouts."""
    return [
        name
        for name, value in vars(config).items()
        if _DROPOUT_FIELD.search(name) and isinstance(value, int | float)
    ]


def _values(
    defaults: PretrainedConfig, overrides: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Return the constructor's arguments under the class's own names."""
    for size in sizes:
        if not hasattr(defaults, _SIZES[size]):
            problem = f"{type(defaults).__name__} has no {_SIZES[size]}, got {sizes[size]}; set it to null"
            raise ConfigError(f"model.{size}", problem)
    aliases = defaults.attribute_map
    own = {name: value for name, value in overrides.items() if name not in aliases}
    general = {_SIZES[size]: value for size, value in sizes.items()} | dict(overrides)
    translated = {aliases.get(name, name): value for name, value in general.items()} | own
    fields = vars(defaults)
    decoder = {name: sizes[size] for size, name in _DECODER_SIZES.items() if size in sizes and name in fields}
    tokens = _foreign_tokens(defaults, translated["vocab_size"]) if "vocab_size" in translated else {}
    return tokens | decoder | translated


def _divided_heads(defaults: PretrainedConfig, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the key-value heads, at most the class's own number, that divide the heads in `values`.

    Without this, Qwen2 would be built with 4 heads and its default of 32 key-value heads.
    """
    heads = values.get(defaults.attribute_map.get("num_attention_heads", "num_attention_heads"))
    own = getattr(type(defaults), "num_key_value_heads", None)  # of the class: an instance has filled in null
    if not (isinstance(heads, int) and heads >= 1 and isinstance(own, int)):
        return {}
    return {"num_key_value_heads": next(n for n in range(min(heads, own), 0, -1) if heads % n == 0)}


def _foreign_tokens(defaults: PretrainedConfig, vocab_size: int) -> dict[str, Any]:
    """Return, unset, the special tokens outside the vocabulary: they belong to a tokenizer not used here."""
    fields = vars(defaults).items()
    return {
        name: None
        for name, value in fields
        if _TOKEN_FIELD.search(name) and isinstance(value, int) and value >= vocab_size
    }


def _table(head: str) -> Any:
    return HEADS[head]._model_mapping  # type: ignore[attr-defined]  # noqa: SLF001 (the only table of them)


def _called_with(
    config: PretrainedConfig, head: str | None, inputs: Mapping[str, Any], targets: torch.Tensor
) -> Batch:
    """Return the batch for a model that takes these inputs, by position where it can."""
    forward = signature(model_class(config, head).forward)
    own = forward.replace(parameters=list(forward.parameters.values())[1:])
    positional, keywords = by_position(own, inputs)
    return Batch(inputs=positional, keywords=keywords, targets=targets)


def _features(config: PretrainedConfig, count: int, random: np.random.Generator) -> torch.Tensor:
    """Return features as a speech model reads them."""
    bins, frames = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if bins is None or frames is None:
        problem = f"{type(config).__name__} does not say which features it reads, as WhisperConfig does"
        raise ConfigError("model.config_class", f"{problem}; use model=python")
    # Whisper's encoder halves the frames before it counts positions
    return torch.from_numpy(random.standard_normal((count, bins, 2 * frames), dtype=np.float32))


def _has_experts(config: PretrainedConfig) -> bool:
    return any(getattr(config, name, None) is not None for name in _EXPERT_COUNTS)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
