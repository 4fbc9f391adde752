"""Llama's transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.models.parts import decoder
from harness.models.shapes.transformer import RotaryDecoderSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSpec(RotaryDecoderSpec):
    """A Llama of any size; a token's forward takes L·(4·D·(D + G·K) + 4·S·D + 6·D·F) + 2·D·V FLOPs.

    Fields:
        tied_head: True where the embedding's weight is the head's too.
    """

    feed_forward_linears = ("gate", "up", "down")

    tied_head: bool

    def build(self) -> nn.Module:
        """Return a `Llama`."""
        return decoder.Llama(self, tied_head=self.tied_head)

    def has_own_head(self) -> bool:
        """Say if it is not tied."""
        return not self.tied_head

    def feed_forward_flops(self) -> int:
        """Return 6·D·F."""
        return 6 * self.width * self.hidden_width
