"""What ranks of the tests of odd models run: one step by each plan, against one of the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from strategies.ac.nested import Nested
from strategies.base import StrategyError
from strategies.shard.model.realisation import realise
from strategies.shard.model.shard_plan import ShardPlan
from tests.strategies.shard.model.odd_models import KEPT, built, inputs
from tests.strategies.shard.shard_ranks import mesh_of

_RELATIVE = 1e-11


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "another mode": lambda model: model.eval(),
    "a hook": lambda model: model.up.register_forward_hook(lambda *_: None),
    "a forward": lambda model: setattr(model.up, "forward", model.up.forward),
    "another module": lambda model: setattr(model, "up", nn.Linear(16, 32)),
    "another method": lambda model: setattr(model, "between", torch.softmax),
    "thawed": lambda model: model.requires_grad_(True),
    "a parametrisation": lambda model: parametrize.register_parametrization(
        model.up, "weight", nn.Identity(), unsafe=True
    ),
}
"""What is done to a sharded model between two calls."""


def differences(_rank: int, name: str, plans: Sequence[ShardPlan]) -> list[list[str]]:
    """Return for each plan what is not as in the plain model: outputs, gradients, buffers, kept tensors."""
    plain = built(name)
    expected = _step(plain)
    return [list(_differences(plain, expected, _planned(name, plan))) for plan in plans]


def in_regions(_rank: int, name: str, plan: ShardPlan, labels: dict[str, list[int]]) -> list[str]:
    """Return what is not as in the plain model where regions are recomputed."""
    plain = built(name)
    expected = _step(plain)
    model = Nested(layers_fqn="", labels=labels).apply(_planned(name, plan), (inputs(),))
    return list(_differences(plain, expected, model))


def refusal(_rank: int, name: str, plan: ShardPlan, what: str) -> str:
    """Return the message with which a sharded model refuses to run otherwise than planned."""
    model = _planned(name, plan)
    model(inputs())
    change = CHANGES.get(what)
    try:
        if change is not None:
            change(model)
        model(inputs()[:2] if what == "another batch" else inputs())
    except StrategyError as error:
        return str(error)
    return "accepted"


def _planned(name: str, plan: ShardPlan) -> nn.Module:
    return realise(built(name), plan, mesh_of((plan.ranks,)))


def _step(model: nn.Module) -> list[Tensor]:
    """Return what the forward gives and leaves behind; gradients stay in the model."""
    torch.manual_seed(1)
    KEPT.clear()
    outputs = [leaf for leaf in tree_leaves(model(inputs())) if isinstance(leaf, Tensor)]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(each.shape, dtype=each.dtype, generator=generator) for each in outputs]
    loss = sum((each * weight).sum() for each, weight in zip(outputs, weights, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    return [each.detach() for each in (*outputs, *KEPT)]


def _differences(plain: nn.Module, expected: list[Tensor], model: nn.Module) -> Iterator[str]:
    actual = _step(model)
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if not _are_close(one, other, one):
            yield f"output {index}"
    largest = max((each.grad for each in plain.parameters() if each.grad is not None), key=_size)
    for (name, one), (its, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        if name != its or not _are_close(one.grad, _whole(other.grad), largest):
            yield name
    for (name, held), (_, its_own) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        if not _are_close(held, its_own, held):
            yield name


def _are_close(one: Tensor | None, other: Tensor | None, beside: Tensor) -> bool:
    if one is None or other is None:
        return one is other
    is_close = one.shape == other.shape and _size(one - other) <= _RELATIVE * max(_size(beside), 1e-6)
    return bool(is_close)


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _whole(tensor: Any) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
