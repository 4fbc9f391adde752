"""The block of every transformer here.

Shapes: B batch, S sequence, D width, R half a head's width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from harness.models.shapes.transformer import TransformerSpec


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to its input.

    Args:
        spec: width and dropout.
        norm: returns a norm of a width.
        attention: maps (B, S, D), and the rotary table where there is one, to (B, S, D).
        feed_forward: maps (B, S, D) to (B, S, D).
    """

    def __init__(
        self,
        spec: TransformerSpec,
        *,
        norm: Callable[[int], nn.Module],
        attention: nn.Module,
        feed_forward: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(spec.width)
        self.attention = attention
        self.feed_forward_norm = norm(spec.width)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BSD: Tensor, *rotary_S2R: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), *rotary_S2R))
        output: Tensor = x_BSD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))
        return output
