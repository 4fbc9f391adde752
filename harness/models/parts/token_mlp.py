"""The modules of a token-wise residual MLP.

Shapes: B batch, S sequence, D width, F hidden width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from harness.models.parts.feed_forward import FeedForward
from harness.models.parts.initialisation import initialise


class MLP(nn.Module):
    """Token logits from each token alone."""

    def __init__(
        self, *, vocab_size: int, n_layers: int, width: int, hidden_width: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            MLPBlock(width=width, hidden_width=hidden_width, dropout=dropout, approximate="none")
            for _ in range(n_layers)
        )
        self.head = nn.Linear(width, vocab_size)
        initialise(self, n_layers=n_layers)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits_BSV: Tensor = self.head(x_BSD)
        return logits_BSV


class MLPBlock(FeedForward):
    """`x + down(dropout(gelu(up(x))))`."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        return x_BSD + super().forward(x_BSD)
