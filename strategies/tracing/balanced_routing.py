"""Fake tensors of a step whose tokens are routed to experts in equal shares.

Which tokens visit an expert depends on data: `topk` over the scores of E experts says it, and the places
where its result equals e are those of expert e. Without data their number is not known. Here it is assumed:
of n choices the first n mod E experts have ceil(n / E), the others floor(n / E). Bytes of a step follow from
it; FLOPs of experts do not, because every choice costs the same wherever it goes. Ranks that share experts
count the choices of each and tell each other: it is assumed that all ranks have as many.

Only this is assumed, and only where it is asked. Whatever else depends on data has no answer, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from strategies.tracing.fakes import Fakes

BALANCED = "every expert gets an equal share of the tokens"
"""What is assumed, in words that complete `assuming that`."""

_aten = torch.ops.aten


class BalancedFakes(Fakes):
    """Fake tensors that know how many choices of `topk` fall on one expert, if all get the same.

    Attributes:
        assumes: `BALANCED`, once a shape has followed from it.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.assumes: tuple[str, ...] = ()
        self._choices = _Notes()
        self._places = _Notes()
        self._counts = _Notes()

    def answer(self, func: Any, types: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator; the places of an expert are as many as those of each other."""
        if func is _aten.nonzero.default and (share := self._share(args[0])) is not None:
            self.assumes = (BALANCED,)
            with self:  # by columns, as the kernels leave them
                shape = (share, args[0].dim())
                return torch.empty_strided(shape, (1, share), dtype=torch.int64, device=args[0].device)
        if func is _aten.bincount.default and self._choices.of(args[0]) == args[2:]:  # with a place for each
            return self._counted(args[0], *args[2:])
        if func is _aten._local_scalar_dense.default and (counts := self._counts.of(args[0])):  # noqa: SLF001 (its name)
            self.assumes = (BALANCED,)
            return counts[args[0].storage_offset()]
        result = super().answer(func, types, args, kwargs)
        if func is torch.ops.c10d.alltoall_base_.default and (counts := self._counts.of(args[1])):
            self._told(args[0], counts, args[2])
        if func is _aten.topk.default and isinstance(result[1], Tensor):
            self._choices.note(result[1], (args[0].size(args[2] if len(args) > 2 else -1),))  # noqa: PLR2004 (its third)
        elif func is _aten.eq.Scalar and (known := self._choices.of(args[0])) and args[1] in range(*known):
            self._places.note(result, (args[1], *known))
        return result

    def _share(self, places: Any) -> int | None:
        """Return how many of `places` are those of one expert; `None` where they are of something else."""
        known = self._places.of(places)
        if known is None:
            return None
        expert, experts = known
        count: int = places.numel()
        return (count - expert + experts - 1) // experts

    def _counted(self, choices: Tensor, experts: int) -> Tensor:
        """Return how many of `choices` fall on each expert."""
        count = choices.numel()
        with self:
            counts = torch.empty(experts, dtype=torch.int64, device=choices.device)
        shares = tuple((count - expert + experts - 1) // experts for expert in range(experts))
        self._counts.note(counts, shares)
        return counts

    def _told(self, taken: Tensor, counts: tuple[int, ...], boxed_group: Any) -> None:
        """Note what the ranks of a group tell this one of its experts: as much as it would tell itself."""
        group = torch.distributed.ProcessGroup.unbox(boxed_group)
        own = len(counts) // group.size()
        shares = counts[group.rank() * own : (group.rank() + 1) * own]
        self._counts.note(taken, shares * group.size())


class _Notes:
    """Numbers that are known of tensors, their views among them, until somebody writes to them."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[torch.UntypedStorage, tuple[int, tuple[int, ...]]] = (
            WeakKeyDictionary()
        )

    def note(self, tensor: Tensor, numbers: tuple[int, ...]) -> None:
        """Note numbers of a tensor that was just made."""
        self._known[tensor.untyped_storage()] = tensor._version, numbers  # noqa: SLF001 (as autograd knows it)

    def of(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Return what is known of a tensor."""
        version, numbers = self._known.get(tensor.untyped_storage(), (0, None))
        return numbers if version == tensor._version else None  # noqa: SLF001 (as above)
