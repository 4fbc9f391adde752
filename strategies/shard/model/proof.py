"""The proof of a realised plan: dense model and stand-ins run on one sample, and are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from strategies import generators
from strategies.base import StrategyError, Tolerance
from strategies.estimate.closeness import drawn_like, furthest, have_one_kind
from strategies.regions.rewind import noted_state

_RANDOM = "draws random numbers, and each rank draws its own; prove it in evaluation, or with dropout 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The results of a pass of a model: outputs, and gradients of parameters by name."""

    outputs: list[Tensor]
    gradients: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, sample: tuple[Any, ...]) -> Results:
        """Run the model, and leave its state, its gradients and all random numbers as they were.

        Raises:
            StrategyError: it draws random numbers.
        """
        put_back = noted_state(model)
        before = [each.now() for each in generators.of_torch()]
        try:
            with torch.enable_grad():
                outputs = [leaf for leaf in tree_leaves(model(*sample)) if isinstance(leaf, Tensor)]
            if generators.moved(before):
                raise StrategyError("shard", f"{type(model).__name__!r} {_RANDOM}")
        finally:
            put_back()
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        made = [each for each in outputs if each.requires_grad]
        given = [drawn_like(each, number) for number, each in enumerate(made)]
        found = torch.autograd.grad(made, list(named.values()), given, allow_unused=True) if made else ()
        gradients = {name: whole(each) for name, each in zip(named, found, strict=False) if each is not None}
        return cls(outputs=[whole(each.detach()) for each in outputs], gradients=gradients)

    def named(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return outputs, and gradients, by what a message calls each."""
        outputs = {f"output {at}": each for at, each in enumerate(self.outputs)}
        return outputs, {f"the gradient of {name!r}": each for name, each in self.gradients.items()}


def proven(
    realise: Callable[[], nn.Module],
    model: nn.Module,
    sample: tuple[Any, ...],
    *,
    tolerance: Tolerance,
    mesh: DeviceMesh,
) -> nn.Module:
    """Return what `realise` makes of `model`, after a comparison with the dense model.

    Each rank computes the dense model once, and holds its gradients until then.

    Args:
        realise: puts the plan on the model.
        model: plain, with the same values on every rank.
        sample: its positional inputs, the same on every rank.
        tolerance: how far results may be apart.

    Raises:
        StrategyError: on every rank, if they differ on one; it names what and by how much.
    """
    expected = Results.of(model, sample)
    realised = realise()
    actual = Results.of(realised, sample)
    said = next(_differences(expected, actual, tolerance), "")
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, said, group=mesh.get_group())  # ranks that raise alone are waited for
    problem = next(filter(None, [said, *every]), None)
    if problem:
        raise StrategyError(
            "shard",
            f"the plan does not do what the dense model does: {problem}; take out of forward what no plan "
            "follows, or use shard=none",
        )
    return realised


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be a rank's shard."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _differences(expected: Results, actual: Results, allowed: Tolerance) -> Iterator[str]:
    """Yield what is further apart than is allowed, outputs first."""
    for one, other in zip(expected.named(), actual.named(), strict=True):
        pairs = {name: (one[name], other[name]) for name in one if name in other}
        yield from (f"{name} is there on one side alone" for name in {**one, **other} if name not in pairs)
        for name, pair in pairs.items():
            if not have_one_kind(pair[:1], pair[1:]):
                yield f"{name} has another shape or dtype"
        found = furthest(pairs, allowed)
        if found is not None:
            name, off = found
            yield f"{name} is {off:.1e} off, where {allowed.relative:g} of the largest is allowed"
