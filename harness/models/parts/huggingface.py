"""Models of `transformers`, built from a configuration with random weights; nothing is downloaded.

This module needs the extra `acbench[hf]`; `harness.models.hf` imports it when such a model is used.
"""

from __future__ import annotations

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
_STYLES = {"colwise": "column", "rowwise": "row"}


def make_config(config_class: str, overrides: Mapping[str, Any], *, dropout: float) -> PretrainedConfig:
    """Return the configuration of class `config_class` with `overrides` and every dropout set to `dropout`.

    A name that the class has itself (`n_layer`) wins over the general alias of the same field
    (`num_hidden_layers`), so defaults can be general and overrides native.

    Raises:
        ConfigError: the class is unknown, an override names no field of it or sets a dropout, the
            class refuses a value, or `dropout` is positive and the class has no dropout.
    """
    cls = _config_class(config_class)
    defaults = cls()
    for name in overrides:
        _require_field(defaults, name)
    aliases = dict(cls.attribute_map)
    general = {aliases[name]: value for name, value in overrides.items() if name in aliases}
    native = {name: value for name, value in overrides.items() if name not in aliases}
    try:
        config = cls(**{**_foreign_tokens(defaults, overrides), **general, **native})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError("model.overrides", f"{config_class} refuses them: {_one_line(error)}") from error
    _set_dropout(config, dropout)
    config.use_cache = False  # a training step reads no cache
    return config


def model_class(config: PretrainedConfig) -> type[Any]:
    """Return the causal language model of `config`.

    Raises:
        ConfigError: `transformers` has none.
    """
    try:
        found: type[Any] = AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001 (the only table of them)
    except KeyError:
        problem = f"no causal language model has this configuration, got {type(config).__name__}"
        raise ConfigError("model.config_class", f"{problem}; use one that has, such as GPT2Config") from None
    return found


def make_model(config: PretrainedConfig) -> nn.Module:
    """Return the causal language model of `config` with its own random initialisation, in training mode.

    Raises:
        ConfigError: `transformers` has none, or its constructor refuses the configuration.
    """
    cls = model_class(config)
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
    prefix = model_class(config).base_model_prefix
    plan: Mapping[str, str] = config.base_model_tp_plan or {}
    for pattern, style in plan.items():
        if style not in _STYLES:
            problem = f"the tensor parallel plan of {type(config).__name__} wants {style!r} for {pattern!r}"
            raise ConfigError("mesh.tp", f"{problem}, which is not supported; use 1")
    return {f"{prefix}.{pattern}": _STYLES[style] for pattern, style in plan.items()}


def sizes(config: PretrainedConfig) -> dict[str, int]:
    """Return `{configuration path: size}` of the heads and hidden units that tensor parallelism divides."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    found = {name: getattr(config, name, None) for name in names}
    return {f"model.overrides.{name}": size for name, size in found.items() if isinstance(size, int)}


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
    where, owner = f"model.overrides.{name}", type(defaults).__name__
    if not hasattr(defaults, name):
        raise ConfigError(
            where, f"{owner} has no such field; its fields: {', '.join(sorted(vars(defaults)))}"
        )
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


def _foreign_tokens(defaults: PretrainedConfig, overrides: Mapping[str, Any]) -> dict[str, None]:
    """Return, unset, the special tokens outside the vocabulary: they belong to a tokenizer not used here."""
    vocab_size = overrides.get("vocab_size", defaults.vocab_size)
    fields = vars(defaults).items()
    return {
        name: None
        for name, value in fields
        if _TOKEN_FIELD.search(name) and isinstance(value, int) and value >= vocab_size
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
