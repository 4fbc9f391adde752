"""A token-wise residual MLP: the smallest model with blocks, a vocabulary and dropout.

Shapes: B batch, S sequence, D width, F hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from harness.models.base import LanguageModelSpec, require_shape
from harness.models.parts.initialisation import initialise


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPSpec(LanguageModelSpec):
    """Embedding, residual blocks of two linears, head; tokens do not see each other.

    Fields:
        n_layers: blocks L, >= 1.
        width: residual width D, >= 1.
        hidden_width: width F between the two linears of a block, >= 1.
    """

    n_layers: int
    width: int
    hidden_width: int

    def __post_init__(self) -> None:
        require_shape(self, n_layers=self.n_layers, width=self.width, hidden_width=self.hidden_width)

    def build(self) -> nn.Module:
        """Return an `MLP`."""
        return MLP(self)

    def flops_per_token(self, sequence_length: int) -> int:  # noqa: ARG002 (tokens do not see each other)
        """Return L·4·D·F + 2·D·V."""
        return 4 * self.n_layers * self.width * self.hidden_width + 2 * self.width * self.vocab_size

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the Megatron pair of every block."""
        return {"layers.*.up": "column", "layers.*.down": "row"}

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the hidden width."""
        return {"model.hidden_width": self.hidden_width}


class MLP(nn.Module):
    """Token logits from each token alone."""

    def __init__(self, spec: MLPSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.layers = nn.ModuleList(MLPBlock(spec) for _ in range(spec.n_layers))
        self.head = nn.Linear(spec.width, spec.vocab_size)
        initialise(self, n_layers=spec.n_layers)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits_BSV: Tensor = self.head(x_BSD)
        return logits_BSV


class MLPBlock(nn.Module):
    """`x + down(dropout(gelu(up(x))))`."""

    def __init__(self, spec: MLPSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.width, spec.hidden_width)
        self.dropout = nn.Dropout(spec.dropout)
        self.down = nn.Linear(spec.hidden_width, spec.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        hidden_BSF = self.dropout(functional.gelu(self.up(x_BSD)))
        output: Tensor = x_BSD + self.down(hidden_BSF)
        return output
