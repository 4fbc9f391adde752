"""Feed-forwards: what a block does to each token alone.

Shapes: D width, F hidden width, B batch, S sequence, T = B·S tokens, E experts, k experts a token, N tokens
of one expert.

Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU); Shazeer et al. 2017, arXiv:1701.06538 (experts).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.parts.expert_dispatch import ExpertDispatch, RouterWatch, slots


class FeedForward(nn.Module):
    """`down(dropout(gelu(up(x))))`, with biases.

    Args:
        width: D of input and output.
        hidden_width: F between the linears.
        dropout: probability; `None` for no such module.
        approximate: form of GELU, exact ("none") or by tanh.
    """

    def __init__(
        self, *, width: int, hidden_width: int, dropout: float | None, approximate: Literal["none", "tanh"]
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.up = nn.Linear(width, hidden_width)
        self.dropout = None if dropout is None else nn.Dropout(dropout)
        self.down = nn.Linear(hidden_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (..., D)."""
        hidden = functional.gelu(self.up(x), approximate=self.approximate)
        output: Tensor = self.down(hidden if self.dropout is None else self.dropout(hidden))
        return output


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, bias-free; 6·D·F FLOPs a token."""

    def __init__(self, *, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden_width, bias=False)
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (..., D)."""
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class RoutedExperts(nn.Module):
    """The k best experts of every token, weighted by the softmax over their scores.

    Attributes:
        capacity: choices of each expert that count, as a multiple of an equal share; `None` for all.
        watch: follows the router; `None` where nobody does.
        dispatch: runs the experts where ranks share them; `None` where all are here.
    """

    capacity: float | None = None
    watch: RouterWatch | None = None
    dispatch: ExpertDispatch | None = None

    def __init__(self, *, width: int, hidden_width: int, n_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, n_experts, bias=False)
        self.experts: nn.ModuleList | nn.ModuleDict = nn.ModuleList(
            SwiGLU(width=width, hidden_width=hidden_width) for _ in range(n_experts)
        )

    def share(self, own: range, dispatch: ExpertDispatch, watch: RouterWatch) -> None:
        """Keep the experts of this rank, by their numbers, and send tokens to those of others."""
        self.experts = nn.ModuleDict({str(number): self.experts[number] for number in own})  # type: ignore[index]
        self.dispatch, self.watch = dispatch, watch

    def limit(self, capacity: float | None) -> None:
        """Keep all experts; each takes as many choices as if ranks shared them."""
        self.capacity = capacity

    @property
    def n_experts(self) -> int:
        """Experts E, on all ranks."""
        return self.router.out_features

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, which add up to 1, and the experts of every token, both of shape (T, k)."""
        scores_TE = self.router(x_TD)
        scores_Tk, experts_Tk = scores_TE.topk(self.top_k, dim=-1)
        if self.watch is not None:
            self.watch.note(scores_TE)
            experts_Tk = self.watch.visited(experts_Tk)
        return scores_Tk.softmax(dim=-1), experts_Tk

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        x_TD = x_BSD.flatten(0, 1)
        weights_Tk, experts_Tk = self.route(x_TD)
        if self.dispatch is not None:
            assert isinstance(self.experts, nn.ModuleDict), "a rank has some of the experts"
            own = list(self.experts.values())
            return self.dispatch(x_TD, weights_Tk, experts_Tk, own).view_as(x_BSD)
        if self.capacity is not None:
            slots_Tk, most = slots(experts_Tk, self.n_experts, self.capacity)
            weights_Tk = weights_Tk * (slots_Tk < most)
        y_TD = torch.zeros_like(x_TD)
        # every expert runs, even with no tokens: all parameters get gradients, all ranks the same collectives
        assert isinstance(self.experts, nn.ModuleList), "experts of other ranks are dispatched to"
        for index, expert in enumerate(self.experts):
            token_N, choice_N = torch.where(experts_Tk == index)
            expert_ND = expert(x_TD.index_select(0, token_N))
            weighted_ND = expert_ND * weights_Tk[token_N, choice_N].unsqueeze(-1)
            # a token occurs once in token_N, so the sum has one order on every device
            y_TD = y_TD.index_add(0, token_N, weighted_ND.type_as(y_TD))
        return y_TD.view_as(x_BSD)
