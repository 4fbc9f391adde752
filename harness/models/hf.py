"""Any causal language model of `transformers`, from its configuration class and random weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from harness.errors import ConfigError
from harness.models.base import Batch, ModelSpec, require_shape
from harness.models.parts.containers import require_container


@dataclass(frozen=True, kw_only=True, slots=True)
class HFSpec(ModelSpec):
    """A `transformers` model; nothing is downloaded.

    Fields:
        vocab_size: the one in `overrides`, where it is set.
        dropout: written to every dropout field of the configuration; refused when positive and there is none.
        config_class: name of a configuration class, `GPT2Config`.
        overrides: fields of that class, under its own names (`n_layer`) or the general ones
            (`num_hidden_layers`); its own win. Values are of the types the class declares.
    """

    config_class: str
    overrides: dict[str, Any]

    def __post_init__(self) -> None:
        require_shape(self)
        if self.overrides.get("vocab_size") != self.vocab_size:
            problem = f"must be model.overrides.vocab_size, {self.overrides.get('vocab_size')}; set only that"
            raise ConfigError("model.vocab_size", f"{problem}, got {self.vocab_size}")

    def build(self) -> nn.Module:
        """Return the model with a language modelling head.

        Raises:
            ConfigError: `transformers` is not installed, the class or an override is unknown or
                refused, or `layers_fqn` names no container of blocks.
        """
        model: nn.Module = _transformers().make_model(self._config())
        require_container(model, self.layers_fqn)
        return model

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of `outputs.logits`, of shape (B, S, V), in float32."""
        return ModelSpec.loss(self, outputs.logits, batch)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the configuration class's own plan.

        Raises:
            ConfigError: it asks for more than splitting linears by column or row.
        """
        plan: dict[str, str] = _transformers().tensor_parallel_plan(self._config())
        return plan

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return heads, key-value heads and hidden width, as far as the configuration has them."""
        sizes: dict[str, int] = _transformers().sizes(self._config())
        return sizes

    def longest_sequence(self) -> int | None:
        """Return the configuration's number of positions."""
        longest: int | None = _transformers().positions(self._config())
        return longest

    def _config(self) -> Any:
        return _transformers().make_config(self.config_class, self.overrides, dropout=self.dropout)


def _transformers() -> ModuleType:
    """Return the module that imports `transformers`, an optional and slow import."""
    try:
        return importlib.import_module("harness.models.parts.huggingface")
    except ModuleNotFoundError as error:
        problem = f"model=hf needs the package {error.name!r}; pip install 'acbench[hf]'"
        raise ConfigError("model.family", problem) from error
