"""GPT-2's transformer: learned positions, LayerNorm before each branch, biased linears, tied head.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.models.parts import decoder
from harness.models.shapes.transformer import DecoderSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTSpec(DecoderSpec):
    """A GPT-2 of any size; a token's forward takes L·(8·D² + 4·S·D + 4·D·F) + 2·D·V FLOPs.

    Fields:
        tied_head: True where the embedding's weight is the head's too, as in GPT-2.
    """

    tied_head: bool = True

    embedded_by = "dropout"

    def build(self) -> nn.Module:
        """Return a `GPT`."""
        return decoder.GPT(self, tied_head=self.tied_head)

    def has_own_head(self) -> bool:
        """Say if it is not tied."""
        return not self.tied_head
