"""A token-wise residual MLP: the smallest model with blocks, a vocabulary and dropout.

Shapes: D width, F hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.models.base import LanguageModelSpec
from harness.models.parts import token_mlp

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPSpec(LanguageModelSpec):
    """Embedding, residual blocks of two linears, head; tokens do not see each other.

    Fields:
        n_layers: blocks L, >= 1.
        width: residual width D, >= 1.
        hidden_width: width F between the two linears of a block, >= 1.
    """

    repeats_one_block: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    n_layers: int
    width: int
    hidden_width: int

    def build(self) -> nn.Module:
        """Return an `MLP`."""
        return token_mlp.MLP(
            vocab_size=self.vocab_size,
            n_layers=self.n_layers,
            width=self.width,
            hidden_width=self.hidden_width,
            dropout=self.dropout,
        )

    def flops_per_token(self, sequence_length: int) -> int:  # noqa: ARG002 (tokens do not see each other)
        """Return L·4·D·F + 2·D·V."""
        return 4 * self.n_layers * self.width * self.hidden_width + 2 * self.width * self.vocab_size

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the Megatron pair of every block."""
        return {"layers.*.up": "column", "layers.*.down": "row"}

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the hidden width."""
        return {"model.hidden_width": self.hidden_width}
