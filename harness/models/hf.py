"""Language models and image classifiers of `transformers`, from a configuration and random weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import ConfigError, optional_package
from harness.models.base import (
    Batch,
    LanguageModelSpec,
    ModelSpec,
    plan_of,
    require_even_heads,
    require_parts,
    token_part,
)
from harness.models.parts import containers

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from harness.models.parts.context_attention import Ring
    from harness.models.parts.expert_dispatch import Mixture


@dataclass(frozen=True, kw_only=True, slots=True)
class HFSpec(LanguageModelSpec):
    """A `transformers` model; nothing is downloaded.

    Fields:
        vocab_size: number of tokens V; equal to `overrides["vocab_size"]` where that is set; unused with
            images.
        dropout: value of every dropout field of the configuration, refused when positive and there is none;
            null leaves them to the class and `overrides`.
        config_class: name of a configuration class, `GPT2Config`.
        n_layers: blocks, >= 1; null for the default of the class.
        width: residual width, >= 1; null for the default of the class.
        n_heads: attention heads, >= 1; null for the default of the class. Without an override, key-value
            heads are the largest divisor of it that is at most the default of the class.
        overrides: fields of the class, under its own names (`n_layer`) or general ones
            (`num_hidden_layers`). They win over the fields above, and own names over general ones.
        head: `causal`, `masked`, `seq2seq`, `speech` or `image`; null for what the class is made for.
        tp_column: FQN patterns of linears that tensor parallelism splits by column; empty for the class's
            own plan.
        tp_row: the same by row.
        tp_summed: FQN patterns of modules between them that run on a shard, such as a norm of heads: their
            parameters stay whole, and ranks add up their gradients.
    """

    dropout: float | None = None  # type: ignore[assignment]  # open here, where the class decides
    config_class: str
    n_layers: int | None
    width: int | None
    n_heads: int | None
    overrides: dict[str, Any] | None
    head: str | None = None
    tp_column: tuple[str, ...] = ()
    tp_row: tuple[str, ...] = ()
    tp_summed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        overridden = (self.overrides or {}).get("vocab_size", self.vocab_size)
        if overridden != self.vocab_size:
            problem = f"must be {overridden}, as in model.overrides, got {self.vocab_size}; set one of them"
            raise ConfigError("model.vocab_size", problem)

    def build(self) -> nn.Module:
        """Return the model with its head.

        Raises:
            ConfigError: `transformers` is not installed, the class or an override is unknown or
                refused, or `layers_fqn` names no container of blocks.
        """
        model: nn.Module = _transformers().make_model(self._config(), self.head)
        containers.require_container(model, self.layers_fqn)
        return model

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of `outputs.logits`, (B, S, V) or (B, classes), in float32."""
        if self.reads_tokens():
            return LanguageModelSpec.loss(self, outputs.logits, batch)
        return torch.nn.functional.cross_entropy(outputs.logits.float(), batch.targets)

    def reads_tokens(self) -> bool:
        """Return whether the head is not one of images."""
        kind: str = _transformers().head_of(type(self._config()), self.head)
        return kind != "image"

    def arranged(self, batch: Batch, random: np.random.Generator) -> Batch:
        """Return a batch of tokens as the model takes them, with random features for speech."""
        arranged: Batch = _transformers().batch_of(self._config(), self.head, batch, random)
        return arranged

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return random images, float32 of shape (B, C, Y, X), and classes, int64 of shape (B,)."""
        drawn: Batch = _transformers().image_batch(self._config(), self.head, batch_size, random)
        return drawn

    def may_drop_out(self) -> bool:
        """Return whether a dropout of the configuration is positive."""
        found: bool = _transformers().drops_out(self._config())
        return found

    def remarks(self, *, ep: int, tp: int) -> tuple[str, ...]:
        """Return how experts run."""
        found: tuple[str, ...] = _transformers().remarks(self._config(), ep=ep, tp=tp)
        return found

    def replaced(self, ep: int) -> tuple[str, ...]:
        """Return the fields of the configuration that the class would choose otherwise."""
        found: tuple[str, ...] = _transformers().replaced(self._config(), self.overrides or {}, ep)
        return found

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the modules that the options name, or else the plan of the configuration class.

        Raises:
            ConfigError: it asks for another way to split.
        """
        given = plan_of(column=self.tp_column, row=self.tp_row, summed=self.tp_summed)
        if given:
            return given
        plan: dict[str, str] = _transformers().tensor_parallel_plan(self._config(), self.head)
        return plan

    def split_plan(self, *, sp: bool, loss_parallel: bool) -> dict[str, str]:
        """Return the plan with the residual in parts of the sequence, logits in parts of the vocabulary.

        Raises:
            ConfigError: blocks are not made of norms and of modules that end in one linear split by row, or
                the head has no weight of its own.
        """
        plan = self.tensor_parallel_plan()
        if sp:
            found = _transformers().sequence_plan(self._config(), self.head, plan, self.layers_fqn)
            plan = {**plan, **found}
        if loss_parallel:
            plan = {**plan, **_transformers().logits_plan(self._config(), self.head)}
        return plan

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return heads, key-value heads and hidden width, as far as the configuration has them."""
        sizes: dict[str, int] = _transformers().split_sizes(self._config())
        return sizes

    def check_context(self, *, sequence_length: int, cp: int, cp_method: str, tp: int) -> None:
        """Refuse heads other than causal ones, attention that is not over all earlier tokens, and lengths.

        Raises:
            ConfigError: the class mixes tokens otherwise, or a size that `cp` does not divide.
        """
        require_parts("sequence_length", sequence_length, "mesh.cp", cp, "mesh.cp=1 without its options")
        _transformers().check_context(self._config(), self.head, sequence_length)
        require_even_heads(self.tensor_parallel_sizes(), cp=cp, cp_method=cp_method, tp=tp)

    def sequence_part(self, batch: Batch, part: int, parts: int) -> Batch:
        """Return a part of tokens and targets, with the positions of its tokens, of shape (1, S)."""
        cut = token_part(batch, part, parts)
        tokens, positions_S = cut.inputs
        named = {"position_ids": positions_S[None]}
        return replace(cut, inputs=(tokens,), keywords=named, positions=frozenset(named))

    def attend_over_parts(self, model: nn.Module, method: str, ring: Ring) -> None:
        """Register the attention with `transformers`, and let the model use it."""
        _transformers().attend_over(model, method, ring)

    def check_experts(self, ep: int) -> None:
        """Refuse a class without experts, ranks that do not divide them, and another way to run them."""
        overrides = self.overrides or {}
        _transformers().check_experts(self._config(), ep, overrides.get("experts_implementation"))

    def mixtures(self, model: nn.Module) -> dict[str, Mixture]:
        """Return the experts modules that run by the library's interface of implementations."""
        found: dict[str, Mixture] = _experts().mixtures(model)
        return found

    def check_dispatch(self, model: nn.Module) -> None:
        """Refuse experts that have another interface, or compute otherwise than it says."""
        _experts().check_dispatch(model)

    def longest_sequence(self) -> int | None:
        """Return the configuration's number of positions."""
        longest: int | None = _transformers().positions(self._config())
        return longest

    def check_stages(self, stages: int) -> None:  # noqa: ARG002 (the model shows how many blocks it has)
        """Refuse an encoder with a decoder, and a head that has no weight of its own."""
        config = self._config()
        if config.is_encoder_decoder:
            problem = (
                f"{self.config_class} has an encoder and a decoder, whose blocks all read what the encoder"
            )
            remedy = "use mesh.pp=1 without its options, or a decoder such as LlamaConfig"
            raise ConfigError("mesh.pp", f"{problem} gives; {remedy}")
        if self.reads_tokens() and config.tie_word_embeddings:
            problem = f"the head of {self.config_class} has no weight but that of the embedding"
            remedy = "use model.overrides={tie_word_embeddings: false}"
            raise ConfigError("mesh.pp", f"{problem}, and the two are in different stages; {remedy}")

    def _config(self) -> Any:
        """Return the configuration of `transformers` with the overrides."""
        return _transformers().make_config(
            self.config_class,
            self.overrides or {},
            sizes=self._sizes() | {"vocab_size": self.vocab_size},
            dropout=self.dropout,
            head=self.head,
        )

    def _sizes(self) -> dict[str, int]:
        sizes = {"n_layers": self.n_layers, "width": self.width, "n_heads": self.n_heads}
        return {name: size for name, size in sizes.items() if size is not None}


def _experts() -> ModuleType:
    """Return the module that runs experts of `transformers`."""
    return importlib.import_module("harness.models.parts.huggingface_experts")


def _transformers() -> ModuleType:
    """Return the module that imports `transformers`, an optional and slow import."""
    optional_package("transformers", where="model=hf", extra="hf")
    return importlib.import_module("harness.models.parts.huggingface")
