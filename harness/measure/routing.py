"""Routers of a step: by how much they decide, and whether a recomputation sends tokens where forward did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from harness.measure.probes.checkpoint_calls import is_backward
from harness.models.parts.expert_dispatch import RouterWatch
from harness.records.measured import Routing


@dataclass(slots=True)
class RoutingLog:
    """Notes the routers of all models of a trial on one rank, each by its name.

    Fields:
        seen: what was noted, by router.
        microbatch: number of the one that runs; a schedule, which has several in flight, says so.
    """

    seen: dict[str, Routing] = field(default_factory=dict)
    microbatch: int = 0

    def watch(self, router: str) -> RouterWatch:
        """Return what follows one router of a model.

        A recomputation visits the experts that the forward of its micro-batch visited: ranks whose tokens go
        elsewhere would exchange other sizes than forward saved, and the step would end with no word of the
        router.
        """
        # on the host and outside of torch: the step is measured, and shall hold no tensor more
        scores: NDArray[Any] | None = None
        of_forward: dict[int, NDArray[Any]] = {}

        def note(of_experts: Tensor) -> None:
            nonlocal scores
            if not isinstance(of_experts, FakeTensor) and not is_backward():
                scores = _values(of_experts)

        def visited(experts: Tensor) -> Tensor:
            nonlocal scores
            if isinstance(experts, FakeTensor):
                return experts
            chosen = _values(experts)
            if not is_backward():
                margin = None if scores is None else _margin(scores, chosen)
                of_forward[self.microbatch], scores = chosen, None
                self.note([Routing(router=router, tokens=len(chosen), margin=margin)])
                return experts
            first = of_forward[self.microbatch]  # a recomputation follows its forward
            changed = int((np.sort(chosen) != np.sort(first)).any(1).sum())
            if not changed:
                return experts
            self.note([Routing(router=router, tokens=len(chosen), changed_tokens=changed)])
            return torch.from_numpy(first).to(experts.device)

        return RouterWatch(note=note, visited=visited)

    def routings(self) -> tuple[Routing, ...]:
        """Return what was noted."""
        return tuple(self.seen.values())

    def note(self, routings: Iterable[Routing]) -> None:
        """Keep the least margin, and the most tokens that one recomputation has sent elsewhere."""
        for each in routings:
            known = self.seen.get(each.router, each)
            margins = [margin for margin in (known.margin, each.margin) if margin is not None]
            self.seen[each.router] = replace(
                each,
                margin=min(margins, default=None),
                changed_tokens=max(known.changed_tokens, each.changed_tokens),
            )


def _margin(scores: NDArray[Any], chosen: NDArray[Any]) -> float | None:
    """Return the least distance of a token's worst chosen score to its best other.

    It is `None` without others, and where some other score is better: these scores do not decide alone.
    """
    if scores.shape[1] == chosen.shape[1]:
        return None
    worst = np.take_along_axis(scores, chosen, 1).min(1)
    np.put_along_axis(scores, chosen, -np.inf, 1)
    margin = float((worst - scores.max(1)).min())
    return margin if margin >= 0 else None


def _values(tensor: Tensor) -> NDArray[Any]:
    """Return a copy of a tensor, which no meter sees."""
    with _disable_current_modes(), torch.no_grad():
        plain = tensor.detach()
        plain = plain.float() if plain.dtype is torch.bfloat16 else plain
        return plain.cpu().numpy().copy()
