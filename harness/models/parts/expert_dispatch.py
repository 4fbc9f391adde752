"""Experts that ranks share: tokens go to the ranks of their experts, and back.

Shapes: T tokens of this rank, D width, k experts a token, N = T·k choices, E experts; P ranks.

An expert gets gradients of the tokens of all ranks that share it, and other parameters those of their rank
alone, which are averaged over the ranks later. So gradients are divided by P on their way to experts, and
multiplied by it on their way back to tokens.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (capacity); Gale et al. 2022, arXiv:2211.15841 (dropless).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.models.parts.exchange import Exchanged
from harness.models.parts.feed_forward import RoutedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertDispatch:
    """Sends tokens to their experts by all-to-all, and weighs what comes back.

    Fields:
        group: the ranks that share the experts, the first ones with the first.
        size: their number P.
    """

    group: dist.ProcessGroup
    size: int

    def __call__(self, layer: RoutedExperts, x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        """Return the weighted sum of what the experts of each token give, of shape (T, D)."""
        run = self._dropless if layer.capacity is None else self._within_capacity
        top_k = experts_Tk.size(1)
        # each choice has a row of its own, so that gradients of a token add up in one order on every device
        x_ND = x_TD.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
        y_ND, weights_N = run(layer, x_ND, weights_Tk.flatten(), experts_Tk)
        return (y_ND * weights_N.unsqueeze(-1)).view(-1, top_k, x_TD.size(1)).sum(1).type_as(x_TD)

    def _dropless(
        self, layer: RoutedExperts, x_ND: Tensor, weights_N: Tensor, experts_Tk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send each expert all of its choices; the ranks tell each other first how many those are."""
        experts_N, n_experts = experts_Tk.flatten(), layer.router.out_features
        order_N = experts_N.argsort(stable=True)
        given_E = experts_N.bincount(minlength=n_experts)
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
        local = len(layer.experts)
        for index, expert in enumerate(_experts(layer)):
            # every expert runs, even with no tokens: all ranks take the same collectives
            output = expert(torch.cat(pieces[index::local]))
            done += output.split([counts[index] for counts in by_rank])
        back = torch.cat([piece for rank in range(self.size) for piece in done[rank :: self.size]])
        home = Exchanged.apply(back, self.group, given, taken, 1 / self.size)
        return home.index_select(0, order_N.argsort()), weights_N

    def _within_capacity(
        self, layer: RoutedExperts, x_ND: Tensor, weights_N: Tensor, experts_Tk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send each expert as many rows, whatever tokens choose; what is beyond gives nothing."""
        slots_Tk, most = layer.slots(experts_Tk)
        slots_N, experts_N = slots_Tk.flatten(), experts_Tk.flatten()
        n_rows = layer.router.out_features * most
        # one row more, for all choices that are dropped
        place_N = torch.where(slots_N < most, experts_N * most + slots_N, n_rows)
        sent = x_ND.new_zeros(n_rows + 1, x_ND.size(1)).index_copy(0, place_N, x_ND)[:n_rows]
        equal = [n_rows // self.size] * self.size
        rows = Exchanged.apply(sent, self.group, equal, equal, self.size)
        by_rank = rows.view(self.size, -1, most, x_ND.size(1))
        done = [
            expert(by_rank[:, index].flatten(0, 1)).view(self.size, most, -1)
            for index, expert in enumerate(_experts(layer))
        ]
        back = torch.stack(done, 1).flatten(0, 2)
        home = Exchanged.apply(back, self.group, equal, equal, 1 / self.size)
        home = torch.cat([home, home.new_zeros(1, home.size(1))])
        return home.index_select(0, place_N), weights_N * (slots_N < most)


def _experts(layer: RoutedExperts) -> list[nn.Module]:
    """Return the experts of this rank, in order."""
    assert isinstance(layer.experts, nn.ModuleDict), "a rank has some of the experts, by their numbers"
    return list(layer.experts.values())
