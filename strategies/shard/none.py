"""`shard=none`: leave operators where the mesh puts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Tolerance
from strategies.shard.base import Sharding

if TYPE_CHECKING:
    from torch import nn

    from strategies.shard.model.graph import TensorAxis


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsharded(Sharding):
    """Leave operators where the mesh puts them; the baseline of every comparison.

    Use when: the mesh has no `tp`, or the model's own tensor parallel plan shall run as torch realises it.

    Where the mesh has `tp`, `step_tolerance` is that of the comparison with the dense model.
    """

    tolerance: ClassVar[Tolerance | None] = None
    reduced_tolerance: ClassVar[Tolerance | None] = None

    def plan(self, model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis) -> None:
        """Return `None`: nothing is decided."""
