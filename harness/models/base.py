"""The contract of a model family: a frozen specification that builds a plain module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.errors import ConfigError, require_at_least, require_fraction

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """What one training step reads.

    Fields:
        inputs: positional inputs of the model; for language models `(tokens,)`, int64 of shape (B, S).
        targets: what the loss compares outputs with, a tensor or a tree of them; for language models the
            token that follows each input token, int64 of shape (B, S); `None` when the loss needs none.
    """

    inputs: tuple[Any, ...]
    targets: Any

    def to(self, device: torch.device) -> Batch:
        """Return the batch with every tensor on `device`."""
        return self._mapped(lambda tensor: tensor.to(device))

    def rows(self, first: int, count: int) -> Batch:
        """Return samples `[first, first + count)`: rows of every tensor, in memory of their own."""
        return self._mapped(
            lambda tensor: tensor[first : first + count].clone(memory_format=torch.contiguous_format)
        )

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` of every tensor."""
        tree = self.inputs, self.targets
        inputs, targets = torch.utils._pytree.tree_map_only(torch.Tensor, change, tree)  # noqa: SLF001 (no public name)
        return dataclasses.replace(self, inputs=inputs, targets=targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model, described; subclasses add its shape and build it.

    Fields:
        name: what the configuration calls the model.
        layers_fqn: FQN of the container that holds the blocks.
        dropout: probability of every dropout in the model, in [0, 1).

    Every other number among the fields of a model is a size.

    Raises:
        ConfigError: a size is below 1, or the dropout outside [0, 1).
    """

    name: str
    layers_fqn: str
    dropout: float

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in values.items():
            if name != "dropout" and isinstance(value, int | float) and not isinstance(value, bool):
                require_at_least(f"model.{name}", value, 1)
        require_fraction("model.dropout", self.dropout)

    def build(self) -> nn.Module:
        """Return the module on the current default device, meta included, with its own initialisation."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalar loss, in float32."""
        raise NotImplementedError

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return `batch_size` samples that the model draws itself, on CPU; rows of every tensor are samples.

        A language model draws none: it reads tokens.
        """
        raise NotImplementedError

    def flops_per_sample(self, sequence_length: int) -> int | None:
        """Return the forward FLOPs of a sample in matmuls, convolutions and attention, or `None` if unknown.

        A multiplication and an addition are two FLOPs. Attention counts the whole S x S square,
        4·S·D FLOPs a token and layer, although a causal kernel may skip half of it; recomputed
        FLOPs are counted by the same rule, so ratios agree.

        Args:
            sequence_length: tokens a sample, where the model is one of language.
        """
        raise NotImplementedError

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return `{FQN pattern: "column" | "row"}` of the linears to split; empty when there is no plan."""
        return {}

    def fixed_batch(self) -> Batch | None:
        """Return the batch that the model brings itself, on CPU, or `None` when any tokens will do."""
        return None

    def files(self) -> tuple[Path, ...]:
        """Return the user's files that decide the model; a change of theirs makes other trials."""
        return ()

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return `{configuration path: size}` of what tensor parallelism divides evenly."""
        return {}

    def check(self, *, sequence_length: int, tp: int) -> None:
        """Refuse what this model cannot do.

        Raises:
            ConfigError: too few positions, no tensor parallel plan, or a size that `tp` does not divide.
        """
        self._check_length(sequence_length)
        if tp == 1:
            return
        if not self.tensor_parallel_plan():
            raise ConfigError("mesh.tp", f"model {self.name!r} has no tensor parallel plan, got {tp}; use 1")
        for where, size in self.tensor_parallel_sizes().items():
            if size % tp:
                raise ConfigError("mesh.tp", f"must divide {where}, {size}, got {tp}")

    def _check_length(self, sequence_length: int) -> None:
        """Refuse a `sequence_length` that the model cannot take; what reads no sequences takes any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelSpec(ModelSpec):
    """A model of token sequences, which it reads from `data`.

    Fields:
        vocab_size: number of tokens V; inputs and targets are in [0, V).
    """

    vocab_size: int

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of `outputs`, logits of shape (B, S, V), in float32."""
        assert batch.targets is not None, "a language model's batch has targets"
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten())

    def flops_per_token(self, sequence_length: int) -> int | None:  # noqa: ARG002 (the default knows none)
        """Return the forward FLOPs of a token, counted as `flops_per_sample` says, or `None` if unknown."""
        return None

    def flops_per_sample(self, sequence_length: int) -> int | None:
        """Return those of S tokens."""
        token_flops = self.flops_per_token(sequence_length)
        return None if token_flops is None else sequence_length * token_flops

    def longest_sequence(self) -> int | None:
        """Return how many positions the model has, or `None` when it does not count them."""
        return None

    def _check_length(self, sequence_length: int) -> None:
        longest = self.longest_sequence()
        if longest is not None and sequence_length > longest:
            problem = f"must be at most {longest}, the positions of {self.name!r}, got {sequence_length}"
            raise ConfigError("sequence_length", problem)


def require_divides(part: str, part_size: int, whole: str, whole_size: int) -> None:
    """Refuse a field `part` of the model that does not divide the field `whole`."""
    if whole_size % part_size:
        raise ConfigError(f"model.{part}", f"must divide model.{whole}, {whole_size}, got {part_size}")
