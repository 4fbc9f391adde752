"""A count of collectives one by one; the harness's own meters add them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.estimate.collectives import collective_name, payload_bytes
from strategies.shard.candidates.redistribution import Collective, Phase

Counts: TypeAlias = Counter[tuple[str, str, int]]
"""How often `(phase, kind, payload bytes)` was seen."""


class Collectives(TorchDispatchMode):
    """Counts collectives by the names and payloads of the harness."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = collective_name(func)
        if name is not None:
            self.counts[_phase(), name, payload_bytes(args, result)] += 1
        return result


def promised(collectives: Sequence[Collective]) -> Counts:
    """Return the collectives of a plan in the same form."""
    return Counter((each.phase, each.kind, each.payload_bytes) for each in collectives)


def _phase() -> Phase:
    # torch has no public way to ask whether autograd is running
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"
