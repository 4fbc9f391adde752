"""A mixture of experts: Llama's attention, and a feed-forward where each token visits k of E experts.

Source: Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import ConfigError
from harness.models.parts import decoder, feed_forward
from harness.models.shapes.transformer import RotaryDecoderSpec

if TYPE_CHECKING:
    from torch import nn

    from harness.models.parts.expert_dispatch import Mixture


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec(RotaryDecoderSpec):
    """A Mixtral of any size; its forward takes the same FLOPs however tokens are routed.

    A token takes L·(4·D·(D + G·K) + 4·S·D + 2·D·E + 6·k·D·F) + 2·D·V, with F the width of one expert.

    Fields:
        hidden_width: width F of one expert, >= 1.
        n_experts: experts E of a block, >= 1.
        top_k: experts k that a token visits, in [1, E].
    """

    feed_forward_linears = ("experts.*.gate", "experts.*.up", "experts.*.down")
    has_sequence_plan = False

    n_experts: int
    top_k: int

    def check_shape(self) -> None:
        """Refuse what any decoder refuses, and a token that visits more experts than there are."""
        RotaryDecoderSpec.check_shape(self)
        if self.top_k > self.n_experts:
            problem = f"must be at most model.n_experts, {self.n_experts}, got {self.top_k}"
            raise ConfigError("model.top_k", problem)

    def check_experts(self, ep: int) -> None:
        """Refuse ranks that do not divide the experts."""
        if self.n_experts % ep:
            more = -(-self.n_experts // ep) * ep
            problem = f"must divide model.n_experts, {self.n_experts}, got {ep}"
            raise ConfigError("mesh.ep", f"{problem}; use a divisor, or model.n_experts={more}")

    def mixtures(self, model: nn.Module) -> dict[str, Mixture]:
        """Return the feed-forwards of all blocks."""
        found = {f"{name}.router": module for name, module in model.named_modules()}
        return {
            router: each for router, each in found.items() if isinstance(each, feed_forward.RoutedExperts)
        }

    def build(self) -> nn.Module:
        """Return a `MoE`."""
        return decoder.MoE(self, n_experts=self.n_experts, top_k=self.top_k)

    def has_own_head(self) -> bool:
        """Return true."""
        return True

    def feed_forward_flops(self) -> int:
        """Return 2·D·E for the router and 6·k·D·F for the experts."""
        return 2 * self.width * self.n_experts + 6 * self.top_k * self.width * self.hidden_width
