"""Experts that ranks share: tokens go to the ranks of their experts, and back.

Shapes: T tokens of this rank, D width, k experts a token, N = T·k choices, E experts; P ranks.

An expert gets gradients of the tokens of all ranks that share it, and other parameters those of their rank
alone, which are averaged over the ranks later. So gradients are divided by P on their way to experts, and
multiplied by it on their way back to tokens.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (capacity); Gale et al. 2022, arXiv:2211.15841 (dropless).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.models.parts.exchange import Exchanged

Expert = Callable[[Tensor], Tensor]
"""One expert: a function of rows, of shape (N, D), to as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterWatch:
    """Follows one router, by functions, whose state no recomputation puts back.

    Fields:
        note: notes the scores of all experts, of shape (T, E), that the next choices follow from.
        visited: returns the experts that tokens visit, where they choose those of shape (T, k).
    """

    note: Callable[[Tensor], None]
    visited: Callable[[Tensor], Tensor]


class Mixture(Protocol):
    """Experts that ranks can share."""

    @property
    def n_experts(self) -> int:
        """Their number E."""

    def share(self, own: range, dispatch: ExpertDispatch, watch: RouterWatch) -> None:
        """Keep the experts of this rank, by their numbers, and send tokens to those of others."""

    def limit(self, capacity: float | None) -> None:
        """Keep all experts; each takes as many choices as if ranks shared them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertDispatch:
    """Sends tokens to their experts by all-to-all, and weighs what comes back.

    Fields:
        group: the ranks that share the experts, the first ones with the first.
        size: their number P.
        capacity: as of `slots`; `None` for all choices.
    """

    group: dist.ProcessGroup
    size: int
    capacity: float | None

    def __call__(self, x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor, own: Sequence[Expert]) -> Tensor:
        """Return the weighted sum of what the experts of each token give, of shape (T, D).

        Args:
            weights_Tk, experts_Tk: weights and numbers of the experts that each token visits.
            own: the experts of this rank, in order.
        """
        top_k = experts_Tk.size(1)
        # each choice has a row of its own, so that gradients of a token add up in one order on every device
        x_ND = x_TD.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
        weights_N = weights_Tk.flatten()
        if self.capacity is None:
            y_ND = self._dropless(x_ND, experts_Tk.flatten(), own)
        else:
            slots_Tk, most = slots(experts_Tk, len(own) * self.size, self.capacity)
            y_ND = self._within_capacity(x_ND, experts_Tk.flatten(), slots_Tk.flatten(), most, own)
            weights_N = weights_N * (slots_Tk.flatten() < most)
        return (y_ND * weights_N.unsqueeze(-1)).view(-1, top_k, x_TD.size(1)).sum(1).type_as(x_TD)

    def _dropless(self, x_ND: Tensor, experts_N: Tensor, own: Sequence[Expert]) -> Tensor:
        """Send each expert all of its choices; the ranks tell each other first how many those are."""
        order_N = experts_N.argsort(stable=True)
        given_E = experts_N.bincount(minlength=len(own) * self.size)
        # not functional: no save list keeps it, so that ranks agree on sizes in each recomputation anew
        taken_E = torch.empty_like(given_E)
        dist.all_to_all_single(taken_E, given_E, group=self.group)
        given = [sum(counts) for counts in given_E.view(self.size, -1).tolist()]
        by_rank = taken_E.view(self.size, -1).tolist()
        taken = [sum(counts) for counts in by_rank]

        # rows come by rank, and of each rank by expert
        rows = Exchanged.apply(x_ND.index_select(0, order_N), self.group, taken, given, self.size)
        pieces = rows.split([count for counts in by_rank for count in counts])
        done: list[Tensor] = []
        for index, expert in enumerate(own):
            # every expert runs, even with no tokens: all ranks take the same collectives
            output = expert(torch.cat(pieces[index :: len(own)]))
            done += output.split([counts[index] for counts in by_rank])
        back = torch.cat([piece for rank in range(self.size) for piece in done[rank :: self.size]])
        home = Exchanged.apply(back, self.group, given, taken, 1 / self.size)
        sorted_back: Tensor = home.index_select(0, order_N.argsort())
        return sorted_back

    def _within_capacity(
        self, x_ND: Tensor, experts_N: Tensor, slots_N: Tensor, most: int, own: Sequence[Expert]
    ) -> Tensor:
        """Send each expert as many rows, whatever tokens choose; what is beyond gives nothing."""
        n_rows = len(own) * self.size * most
        # one row more, for all choices that are dropped
        place_N = torch.where(slots_N < most, experts_N * most + slots_N, n_rows)
        sent = x_ND.new_zeros(n_rows + 1, x_ND.size(1)).index_copy(0, place_N, x_ND)[:n_rows]
        equal = [n_rows // self.size] * self.size
        rows = Exchanged.apply(sent, self.group, equal, equal, self.size)
        by_rank = rows.view(self.size, -1, most, x_ND.size(1))
        done = [
            expert(by_rank[:, index].flatten(0, 1)).view(self.size, most, -1)
            for index, expert in enumerate(own)
        ]
        back = torch.stack(done, 1).flatten(0, 2)
        home = Exchanged.apply(back, self.group, equal, equal, 1 / self.size)
        home = torch.cat([home, home.new_zeros(1, home.size(1))])
        return home.index_select(0, place_N)


def slots(experts_Tk: Tensor, n_experts: int, capacity: float) -> tuple[Tensor, int]:
    """Return how many choices of the same expert come before each, and how many of them count.

    Args:
        experts_Tk: numbers of the experts that tokens choose.
        n_experts: experts E.
        capacity: choices of each expert that count, as a multiple of an equal share.
    """
    # `one_hot` reads its largest number, which a prediction has not
    chosen_NE = experts_Tk.flatten().unsqueeze(1) == torch.arange(n_experts, device=experts_Tk.device)
    slots_N = ((chosen_NE.cumsum(0) - 1) * chosen_NE).sum(1)
    most = len(experts_Tk)  # a token chooses an expert once
    return slots_N.view_as(experts_Tk), min(most, math.ceil(capacity * experts_Tk.numel() / n_experts))


def shared_experts(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules of each mixture that hold the experts of this rank."""
    for module in model.modules():
        if getattr(module, "dispatch", None) is not None:
            experts = getattr(module, "experts", None)
            yield [module] if experts is None else list(experts.children())
