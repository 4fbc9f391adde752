"""Any causal language model of `transformers`, from its configuration class and random weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError, optional_package
from harness.models.base import Batch, LanguageModelSpec, ModelSpec
from harness.models.parts import containers

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class HFSpec(LanguageModelSpec):
    """A `transformers` model; nothing is downloaded.

    Fields:
        vocab_size: number of tokens V; equal to `overrides["vocab_size"]` where that is set.
        dropout: value of every dropout field of the configuration; refused when positive and there is none.
        config_class: name of a configuration class, `GPT2Config`.
        n_layers: blocks, >= 1; null for the default of the class.
        width: residual width, >= 1; null for the default of the class.
        n_heads: attention heads, >= 1; null for the default of the class. Without an override, key-value
            heads are the largest divisor of it that is at most the default of the class.
        overrides: fields of the class, under its own names (`n_layer`) or general ones
            (`num_hidden_layers`). They win over the fields above, and own names over general ones.
    """

    config_class: str
    n_layers: int | None
    width: int | None
    n_heads: int | None
    overrides: dict[str, Any] | None

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        overridden = (self.overrides or {}).get("vocab_size", self.vocab_size)
        if overridden != self.vocab_size:
            problem = f"must be {overridden}, as in model.overrides, got {self.vocab_size}; set one of them"
            raise ConfigError("model.vocab_size", problem)

    def build(self) -> nn.Module:
        """Return the model with a language modelling head.

        Raises:
            ConfigError: `transformers` is not installed, the class or an override is unknown or
                refused, or `layers_fqn` names no container of blocks.
        """
        model: nn.Module = _transformers().make_model(self._config())
        containers.require_container(model, self.layers_fqn)
        return model

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of `outputs.logits`, of shape (B, S, V), in float32."""
        return LanguageModelSpec.loss(self, outputs.logits, batch)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the plan of the configuration class.

        Raises:
            ConfigError: it asks for more than splitting linears by column or row.
        """
        plan: dict[str, str] = _transformers().tensor_parallel_plan(self._config())
        return plan

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return heads, key-value heads and hidden width, as far as the configuration has them."""
        sizes: dict[str, int] = _transformers().split_sizes(self._config())
        return sizes

    def longest_sequence(self) -> int | None:
        """Return the configuration's number of positions."""
        longest: int | None = _transformers().positions(self._config())
        return longest

    def _config(self) -> Any:
        return _transformers().make_config(
            self.config_class,
            self.overrides or {},
            sizes=self._sizes() | {"vocab_size": self.vocab_size},
            dropout=self.dropout,
        )

    def _sizes(self) -> dict[str, int]:
        sizes = {"n_layers": self.n_layers, "width": self.width, "n_heads": self.n_heads}
        return {name: size for name, size in sizes.items() if size is not None}


def _transformers() -> ModuleType:
    """Return the module that imports `transformers`, an optional and slow import."""
    optional_package("transformers", where="model=hf", extra="hf")
    return importlib.import_module("harness.models.parts.huggingface")
