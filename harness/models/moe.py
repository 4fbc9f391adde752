"""A mixture of experts: Llama's attention, and a feed-forward where each token visits k of E experts.

Shapes: B batch, S sequence, D width, T = B·S tokens, E experts, k experts a token, N tokens of one
expert, R half a head's width, V vocabulary.

Source: Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.models.base import LanguageModelSpec, require_divides, require_shape
from harness.models.parts.initialisation import initialise
from harness.models.parts.rotary import (
    GroupedQueryAttention,
    attention_flops_per_token,
    require_even_heads,
    rotary_table,
)
from harness.models.parts.swiglu import SwiGLU

_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec(LanguageModelSpec):
    """A Mixtral of any size.

    Fields:
        n_layers: blocks L, >= 1.
        width: residual width D, a multiple of `n_heads`; heads are of even width.
        n_heads: query heads H, a multiple of `n_kv_heads`.
        n_kv_heads: key-value heads G, >= 1.
        hidden_width: width F of one expert, >= 1.
        n_experts: experts E of a block, >= 1.
        top_k: experts k that a token visits, in [1, E].
        max_positions: length of the rotary table; the longest sequence.
        rope_theta: base of the rotary frequencies, >= 1.
    """

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    hidden_width: int
    n_experts: int
    top_k: int
    max_positions: int
    rope_theta: float

    def __post_init__(self) -> None:
        require_shape(
            self,
            n_layers=self.n_layers,
            width=self.width,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            hidden_width=self.hidden_width,
            n_experts=self.n_experts,
            top_k=self.top_k,
            max_positions=self.max_positions,
            rope_theta=self.rope_theta,
        )
        require_divides("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        require_even_heads(width=self.width, n_heads=self.n_heads)
        if self.top_k > self.n_experts:
            problem = f"must be at most model.n_experts, {self.n_experts}, got {self.top_k}"
            raise ConfigError("model.top_k", problem)

    def build(self) -> nn.Module:
        """Return a `MoE`."""
        return MoE(self)

    def flops_per_token(self, sequence_length: int) -> int:
        """Return L·(4·D·(D + G·K) + 4·S·D + 2·D·E + 6·k·D·F) + 2·D·V; the same however tokens are routed."""
        attention = attention_flops_per_token(
            width=self.width,
            kv_width=self.n_kv_heads * self.width // self.n_heads,
            sequence_length=sequence_length,
        )
        feed_forward = 2 * self.width * self.n_experts + 6 * self.top_k * self.width * self.hidden_width
        return self.n_layers * (attention + feed_forward) + 2 * self.width * self.vocab_size

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the plan: heads and every expert's hidden units are split, routers are whole."""
        return {
            "layers.*.attention.wq": "column",
            "layers.*.attention.wk": "column",
            "layers.*.attention.wv": "column",
            "layers.*.attention.wo": "row",
            "layers.*.feed_forward.experts.*.gate": "column",
            "layers.*.feed_forward.experts.*.up": "column",
            "layers.*.feed_forward.experts.*.down": "row",
        }

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return both numbers of heads and the hidden width."""
        return {
            "model.n_heads": self.n_heads,
            "model.n_kv_heads": self.n_kv_heads,
            "model.hidden_width": self.hidden_width,
        }

    def longest_sequence(self) -> int:
        """Return the length of the rotary table."""
        return self.max_positions


class MoE(nn.Module):
    """Next-token logits of a decoder-only transformer with sparse feed-forwards."""

    rotary: Tensor  # (positions, 2, R)

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.layers = nn.ModuleList(MoEBlock(spec) for _ in range(spec.n_layers))
        self.norm = nn.RMSNorm(spec.width, eps=_NORM_EPSILON)
        self.head = nn.Linear(spec.width, spec.vocab_size, bias=False)
        table = rotary_table(
            positions=spec.max_positions, head_width=spec.width // spec.n_heads, theta=spec.rope_theta
        )
        self.register_buffer("rotary", table, persistent=False)
        initialise(self, n_layers=spec.n_layers)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        rotary_S2R = self.rotary[: tokens_BS.size(1)]
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, rotary_S2R)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV


class MoEBlock(nn.Module):
    """Attention, then the routed feed-forward, each behind an RMSNorm and added to its input."""

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.width, eps=_NORM_EPSILON)
        self.attention = GroupedQueryAttention(
            width=spec.width, n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, dropout=spec.dropout
        )
        self.feed_forward_norm = nn.RMSNorm(spec.width, eps=_NORM_EPSILON)
        self.feed_forward = RoutedExperts(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BSD: Tensor, rotary_S2R: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), rotary_S2R))
        output: Tensor = x_BSD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))
        return output


class RoutedExperts(nn.Module):
    """The k best experts of every token, weighted by the softmax over their scores; no token is dropped."""

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.top_k = spec.top_k
        self.router = nn.Linear(spec.width, spec.n_experts, bias=False)
        self.experts = nn.ModuleList(
            SwiGLU(width=spec.width, hidden_width=spec.hidden_width) for _ in range(spec.n_experts)
        )

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, which add up to 1, and the experts of every token, both of shape (T, k)."""
        scores_Tk, experts_Tk = self.router(x_TD).topk(self.top_k, dim=-1)
        return scores_Tk.softmax(dim=-1), experts_Tk

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        x_TD = x_BSD.flatten(0, 1)
        weights_Tk, experts_Tk = self.route(x_TD)
        y_TD = torch.zeros_like(x_TD)
        # every expert runs, even with no tokens: all parameters get gradients, all ranks the same collectives
        for index, expert in enumerate(self.experts):
            token_N, choice_N = torch.where(experts_Tk == index)
            expert_ND = expert(x_TD.index_select(0, token_N))
            weighted_ND = expert_ND * weights_Tk[token_N, choice_N].unsqueeze(-1)
            # a token occurs once in token_N, so the sum has one order on every device
            y_TD = y_TD.index_add(0, token_N, weighted_ND.type_as(y_TD))
        return y_TD.view_as(x_BSD)
