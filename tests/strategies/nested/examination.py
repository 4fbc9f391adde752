"""One model twice, plain and with regions, in the same steps: whatever is not equal is listed."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from strategies.ac.nested import Nested

WIDTH, ROWS = 4, 3


class Given(nn.Module):
    """Two linears `a` and `b`, whatever else is given, and a function that is its forward."""

    def __init__(self, forward: Callable[..., Any], **more: Any) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.does = forward
        for name, value in more.items():
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, its labels and its inputs.

    Fields:
        forward: of a `Given`.
        more: what else that holds.
        args, kwargs: inputs of one step, made anew for each.
        labels: by default both linears, in one region.
        changes: what happens to the model between two steps.
    """

    forward: Callable[..., Any]
    more: Callable[[], dict[str, Any]] = dict
    args: Callable[[], tuple[Any, ...]] = lambda: (rows(),)
    kwargs: Callable[[], dict[str, Any]] = dict
    labels: Mapping[str, Any] = field(default_factory=lambda: {"a": 0, "b": 0})
    changes: Callable[[Any], Any] = lambda _: None

    def model(self) -> Given:
        torch.manual_seed(0)
        return Given(self.forward, **self.more())

    def differences(self, steps: int = 2) -> list[str]:
        """Return what differs in some of `steps` training steps."""
        plain = self.model()
        model = copy.deepcopy(plain)
        Nested(labels=self.labels).apply(model)
        found = []
        for number in range(steps):
            expected, actual = self.step(plain, number), self.step(model, number)
            found += [f"step {number}: {each}" for each in different(expected, actual)]
            self.changes(plain)
            self.changes(model)
        return found

    def step(self, model: nn.Module, number: int) -> dict[str, Any]:
        torch.manual_seed(number)
        return step(model, *self.args(), **self.kwargs())


def step(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return all that one forward and backward of `model` gives and leaves behind."""
    model.zero_grad()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 (users do)
    outputs = model(*args, **kwargs)
    leaves, structure = tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    loss: Any = sum(
        (t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in tensors if t.requires_grad
    )
    loss.backward()
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return {
        "structure": structure,
        "constants": [leaf for leaf in leaves if not isinstance(leaf, Tensor)],
        "loss": loss.detach(),
        "generator": torch.get_rng_state(),
        "generator of Python": random.getstate(),
        **{f"output {index}": tensor.detach().clone() for index, tensor in enumerate(tensors)},
        **{f"gradient of input {index}": tensor.grad for index, tensor in enumerate(inputs)},
        **{f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()},
        **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()},
    }


def different(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not equal bit for bit; absence is a difference too."""
    assert list(expected) == list(actual)
    return [name for name, value in expected.items() if not _is_equal(value, actual[name])]


def _is_equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return expected.dtype == actual.dtype and torch.equal(expected, actual)
    return type(expected) is type(actual) and bool(expected == actual)


class Calls:
    """Counts completed forward calls of the modules of a class, or of those named, with hooks."""

    def __init__(self, model: nn.Module, of: type[nn.Module] | Collection[str]) -> None:
        self.counts: Counter[str] = Counter()
        for fqn, module in model.named_modules():
            if isinstance(module, of) if isinstance(of, type) else fqn in of:
                module.register_forward_hook(lambda *_, fqn=fqn: self.counts.update([fqn]))

    def __getitem__(self, fqn: str) -> int:
        return self.counts[fqn]
