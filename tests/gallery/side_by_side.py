"""A plain model and a checkpointed one, trained side by side: what differs, with no probe of the harness."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies import Strategy

STEPS = 4
ATTRIBUTES_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}

Batch = tuple[Any, ...] | Mapping[str, Any]
Variant = Strategy | Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """What the two runs show.

    Fields:
        parts: what differs in the first step with a difference, in the order of a step; `hides_error` where
            only the plain run raises, and `leak`.
        gradients: relative error of the worst gradient of that step, `inf` for a missing one.
        raises: what the plain run and the checkpointed run raise; empty for nothing.
        warns: what torch says in the checkpointed run.
        saved_bytes: alive after forward, of both.
        leaked_bytes: a step, of both.
    """

    parts: tuple[str, ...]
    gradients: float
    raises: tuple[str, str]
    warns: str
    saved_bytes: tuple[int, int]
    leaked_bytes: tuple[int, int]


@dataclass(kw_only=True, slots=True)
class Run:
    """One model's run; `steps` has what each step left, by part."""

    steps: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    raised: str = ""
    warned: str = ""
    saved_bytes: int = 0
    leaked_bytes: int = 0


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operators made and somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.given: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature is torch's
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.given:
                    self.known[storage._cdata] = storage
        return found

    def leave_out(self, model: nn.Module) -> None:
        """Count neither parameters nor buffers."""
        owned = (*model.parameters(), *model.buffers())
        self.given = {each.untyped_storage()._cdata for each in owned}

    def total(self) -> int:
        """Return the bytes alive now."""
        return sum(storage.nbytes() for storage in list(self.known.values()))


def side_by_side(
    make: Callable[[], nn.Module],
    batch: Batch | Sequence[Batch],
    variant: Variant,
    *,
    weighs: bool = True,
) -> Truth:
    """Train both and compare.

    Args:
        make: returns the plain model.
        batch: positional or keyword inputs, or a list of these, micro-batches: all forward, then all
            backward.
        variant: returns the checkpointed model.
        weighs: whether bytes are counted; torch.compile compiles nothing while they are.
    """
    live = LiveBytes if weighs else NoBytes
    plain = _run(make, batch, lambda model: model, live())
    other = _run(make, batch, variant, live())
    parts, gradients = _first_difference(plain, other)
    hides = plain.raised and not other.raised
    leaks = other.leaked_bytes > plain.leaked_bytes
    return Truth(
        parts=(*(["hides_error"] if hides else []), *parts, *(["leak"] if leaks else [])),
        gradients=gradients,
        raises=(plain.raised, other.raised),
        warns=other.warned,
        saved_bytes=(plain.saved_bytes, other.saved_bytes),
        leaked_bytes=(plain.leaked_bytes, other.leaked_bytes),
    )


class NoBytes(nullcontext[None]):
    """What does not count."""

    def total(self) -> int:
        """Return nothing."""
        return 0

    def leave_out(self, model: nn.Module) -> None:
        """Leave nothing out."""


def _run(
    make: Callable[[], nn.Module],
    batch: Batch | Sequence[Batch],
    variant: Variant,
    live: LiveBytes | NoBytes,
) -> Run:
    run = Run()
    _seed(0)
    model = make()
    _seed(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _train(_varied(model, variant), _in_flight(batch), run, live)
        except RuntimeError as error:
            run.raised = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    run.warned = next((str(each.message).splitlines()[0] for each in said), "")
    return run


def _train(model: nn.Module, batches: list[Batch], run: Run, live: LiveBytes | NoBytes) -> None:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    live.leave_out(model)
    held = []
    before = dict(_state(model))
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = [_fresh(each) for each in batches]
        with live:
            losses = [_loss(_call(model, each)) for each in inputs]
        run.saved_bytes = run.saved_bytes or live.total()
        for loss in losses:
            loss.backward()
        run.steps.append(_left(model, losses, before))
        optimizer.step()
        del losses, loss, inputs
        held.append(live.total())
    if held[-1] > held[1]:
        for _ in range(3):  # what a cycle of Python objects holds is no leak, and one may free the next
            gc.collect()
        run.leaked_bytes = max(live.total() - held[1], 0) // (STEPS - 2)


def _left(model: nn.Module, losses: list[torch.Tensor], before: dict[str, Any]) -> dict[str, dict[str, Any]]:
    gradients = {
        name: None if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters(remove_duplicate=False)
    }
    return {
        "loss": {str(index): loss.detach().clone() for index, loss in enumerate(losses)},
        "gradients": gradients,
        "buffers": {name: each.clone() for name, each in model.named_buffers()},
        "state": {name: each for name, each in _state(model) if not _same(each, before.get(name))},
        "rng_state": {
            "torch": torch.get_rng_state(),
            "random": random.getstate(),
            "numpy": str(list(np.random.get_state(legacy=False).items())),  # noqa: NPY002
        },
    }


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield numbers, words, tensors, lengths of containers and states of generators."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ATTRIBUTES_OF_TORCH:
                continue
            if isinstance(value, list | dict | set):
                yield f"{fqn}.{name}", len(value)
            elif isinstance(value, torch.Generator):
                yield f"{fqn}.{name}", value.get_state()
            elif isinstance(value, torch.Tensor):
                yield f"{fqn}.{name}", value.detach().clone()
            elif isinstance(value, int | float | str):
                yield f"{fqn}.{name}", value


def _first_difference(plain: Run, other: Run) -> tuple[list[str], float]:
    """Return what differs in the first step with a difference, and how far its gradients are apart."""
    for one, two in zip(plain.steps, other.steps, strict=False):
        differing = [part for part in one if not _same(one[part], two[part])]
        if differing:
            return differing, max(map(_relative, two["gradients"].values(), one["gradients"].values()))
    return [], 0.0


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return type(one) is type(two) and bool(one == two)


def _relative(found: torch.Tensor | None, right: torch.Tensor | None) -> float:
    if found is None or right is None:
        return 0.0 if found is right else float("inf")
    return float((found - right).norm() / right.norm().clamp_min(1e-30))


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def _varied(model: nn.Module, variant: Variant) -> nn.Module:
    return variant.apply(model) if isinstance(variant, Strategy) else variant(model)


def _in_flight(batch: Any) -> list[Any]:
    return batch if isinstance(batch, list) else [batch]


def _fresh(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _fresh(each) for name, each in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_fresh(each) for each in batch)
    return batch.detach().clone() if isinstance(batch, torch.Tensor) else batch


def _call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def _loss(output: Any) -> torch.Tensor:
    given = getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.stack([leaf.float().mean() for leaf in leaves if leaf.is_floating_point()]).sum()
