"""Routers of a step: by how much they decide, and whether a recomputation sends tokens where forward did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from harness.records.measured import Routing


@dataclass(frozen=True, slots=True)
class RoutingLog:
    """Notes the routers of all models of a trial on one rank, each by its name.

    Fields:
        seen: what was noted, by router.
    """

    seen: dict[str, Routing] = field(default_factory=dict)

    def watch(self, router: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return what watches one router of a model: a function, whose state no recomputation puts back.

        It takes scores of shape (T, E) and the k best experts, of shape (T, k), and returns the experts that
        tokens visit. In a recomputation these are those of forward: ranks whose tokens go elsewhere would
        exchange other sizes than forward saved, and the step would end with no word of the router.
        """
        of_forward: NDArray[Any] | None = None

        def watch(scores: Tensor, experts: Tensor) -> Tensor:
            nonlocal of_forward
            if isinstance(experts, FakeTensor):
                return experts
            chosen = _values(experts)
            if not _is_recomputed():
                # on the host and outside of torch: the step is measured, and shall hold no tensor more
                of_forward = chosen
                self._note(router, tokens=len(chosen), margin=_margin(scores, chosen.shape[1]), changed=0)
                return experts
            assert of_forward is not None, "a recomputation follows its forward"
            changed = int((np.sort(chosen) != np.sort(of_forward)).any(1).sum())
            if not changed:
                return experts
            self._note(router, tokens=len(chosen), margin=None, changed=changed)
            return torch.from_numpy(of_forward).to(experts.device)

        return watch

    def routings(self) -> tuple[Routing, ...]:
        """Return what was noted."""
        return tuple(self.seen.values())

    def _note(self, router: str, *, tokens: int, margin: float | None, changed: int) -> None:
        """Keep the least margin, and the most tokens that one recomputation has sent elsewhere."""
        known = self.seen.get(router, Routing(router=router, tokens=tokens))
        margins = [each for each in (known.margin, margin) if each is not None]
        self.seen[router] = Routing(
            router=router,
            tokens=tokens,
            margin=min(margins, default=None),
            changed_tokens=max(known.changed_tokens, changed),
        )


def _is_recomputed() -> bool:
    """Say if backward runs a forward."""
    return bool(torch._C._current_graph_task_id() != -1)  # type: ignore[attr-defined]  # noqa: SLF001 (no public name)


def _margin(scores: Tensor, top_k: int) -> float | None:
    """Return the least distance of a token's worst chosen score to its best other; `None` without others."""
    n_experts = scores.size(1)
    if top_k == n_experts:
        return None
    first = n_experts - top_k  # in rising order, the first of those that are chosen
    ranked = np.partition(_values(scores), (first - 1, first))
    return float((ranked[:, first] - ranked[:, first - 1]).min())


def _values(tensor: Tensor) -> NDArray[Any]:
    """Return a copy of a tensor, which no meter sees."""
    with _disable_current_modes(), torch.no_grad():
        plain = tensor.detach()
        plain = plain.float() if plain.dtype is torch.bfloat16 else plain
        return plain.cpu().numpy().copy()
