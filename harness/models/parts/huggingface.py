"""Models of `transformers`, built from a configuration with random weights; nothing is downloaded.

This module needs the extra `acbench[hf]`; `harness.models.hf` imports it when such a model is used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from harness.errors import ConfigError

_DROPOUT_FIELD = re.compile(r"(_pdrop|dropout|dropout_prob|dropout_rate)$")
_TOKEN_FIELD = re.compile(r"(bos|eos|pad)_token_id$")
_SIZES = {
    "n_layers": "num_hidden_layers",
    "width": "hidden_size",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_STYLES = {"colwise": "column", "rowwise": "row"}


def make_config(
    config_class: str, overrides: Mapping[str, Any], *, sizes: Mapping[str, int], dropout: float
) -> PretrainedConfig:
    """Return a configuration of class `config_class` with every dropout set to `dropout`.

    Args:
        config_class: the class's name.
        overrides: its fields. A name that the class has itself (`n_layer`) wins over the general
            alias of the same field (`num_hidden_layers`).
        sizes: `n_layers`, `width`, `n_heads` or `vocab_size`, where `overrides` does not set them.
        dropout: probability of every dropout.

    Raises:
        ConfigError: the class is unknown or of no language model, it has no field for an override
            or a size, an override sets a dropout, the class refuses a value, or `dropout` is
            positive and the class has no dropout.
    """
    cls = _config_class(config_class)
    model_class(cls)
    defaults = cls()
    for name in overrides:
        _require_field(defaults, name)
    values = _values(defaults, overrides, sizes)
    values = _divided_heads(defaults, values) | values
    try:
        config = cls(**values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError("model.overrides", f"{config_class} refuses them: {_one_line(error)}") from error
    _set_dropout(config, dropout)
    config.use_cache = False  # a training step reads no cache
    return config


def model_class(config_class: type[Any]) -> type[Any]:
    """Return the causal language model of `config_class`.

    Raises:
        ConfigError: `transformers` has none.
    """
    try:
        found: type[Any] = AutoModelForCausalLM._model_mapping[config_class]  # noqa: SLF001 (the only table of them)
    except KeyError:
        problem = f"no causal language model has this configuration, got {config_class.__name__}"
        raise ConfigError("model.config_class", f"{problem}; use one that has, such as GPT2Config") from None
    return found


def make_model(config: PretrainedConfig) -> nn.Module:
    """Return the causal language model of `config` with its own random initialisation, in training mode.

    Raises:
        ConfigError: its constructor refuses the configuration.
    """
    cls = model_class(type(config))
    try:
        model: nn.Module = cls(config)
    except (TypeError, ValueError) as error:
        raise ConfigError("model.overrides", f"{cls.__name__} refuses them: {_one_line(error)}") from error
    return model.train()


def tensor_parallel_plan(config: PretrainedConfig) -> dict[str, str]:
    """Return the class's own plan with full FQN patterns; empty when it has none.

    Raises:
        ConfigError: the plan asks for more than splitting linears by column or row.
    """
    prefix = model_class(type(config)).base_model_prefix
    plan: Mapping[str, str] = config.base_model_tp_plan or {}
    for pattern, style in plan.items():
        if style not in _STYLES:
            problem = f"the tensor parallel plan of {type(config).__name__} wants {style!r} for {pattern!r}"
            raise ConfigError("mesh.tp", f"{problem}, which is not supported; use 1")
    return {f"{prefix}.{pattern}": _STYLES[style] for pattern, style in plan.items()}


def split_sizes(config: PretrainedConfig) -> dict[str, int]:
    """Return `{configuration path: size}` of the heads and hidden units that tensor parallelism divides."""
    paths = {
        "num_attention_heads": "model.n_heads",
        "num_key_value_heads": "model.overrides.num_key_value_heads",
        "intermediate_size": "model.overrides.intermediate_size",
    }
    found = {path: getattr(config, name, None) for name, path in paths.items()}
    return {path: size for path, size in found.items() if isinstance(size, int)}


def positions(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that `config` allows, or `None` when it sets no limit."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def _config_class(name: str) -> type[Any]:
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PretrainedConfig)):
        problem = "must be a configuration class of transformers, such as GPT2Config"
        raise ConfigError("model.config_class", f"{problem}, got {name!r}")
    return found


def _require_field(defaults: PretrainedConfig, name: str) -> None:
    where = f"model.overrides.{name}"
    if not hasattr(defaults, name):
        own = sorted(vars(defaults).keys() - vars(PretrainedConfig()).keys())
        close = difflib.get_close_matches(name, own, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        problem = f"{type(defaults).__name__} has no such field; {meant}its own: {', '.join(own)}"
        raise ConfigError(where, problem)
    if _DROPOUT_FIELD.search(name):
        raise ConfigError(where, "every dropout of the model is set by model.dropout; set that")


def _set_dropout(config: PretrainedConfig, dropout: float) -> None:
    fields = [
        name
        for name, value in vars(config).items()
        if _DROPOUT_FIELD.search(name) and isinstance(value, int | float)
    ]
    if dropout > 0 and not fields:
        problem = f"must be 0, because {type(config).__name__} has no dropout field"
        raise ConfigError("model.dropout", f"{problem}, got {dropout}")
    for name in fields:
        setattr(config, name, float(dropout))


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
    return _foreign_tokens(defaults, translated["vocab_size"]) | translated


def _divided_heads(defaults: PretrainedConfig, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the key-value heads, at most the class's own number, that divide the heads in `values`.

    Without this, Qwen2 would be built with 4 heads and its default of 32 key-value heads.
    """
    heads = values.get(defaults.attribute_map.get("num_attention_heads", "num_attention_heads"))
    own = getattr(type(defaults), "num_key_value_heads", None)  # of the class: an instance has filled in null
    if not (isinstance(heads, int) and heads >= 1 and isinstance(own, int)):
        return {}
    return {"num_key_value_heads": _largest_divisor(heads, at_most=own)}


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(n for n in range(min(number, at_most), 0, -1) if number % n == 0)


def _foreign_tokens(defaults: PretrainedConfig, vocab_size: int) -> dict[str, Any]:
    """Return, unset, the special tokens outside the vocabulary: they belong to a tokenizer not used here."""
    fields = vars(defaults).items()
    return {
        name: None
        for name, value in fields
        if _TOKEN_FIELD.search(name) and isinstance(value, int) and value >= vocab_size
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
