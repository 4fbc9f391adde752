"""Models of other people under `ac=nested`, trained beside the plain model: equal bit for bit, or refused.

Each architecture is small, has random weights and dropout of 0.1 in every `nn.Dropout`, and is trained for
two steps in each of the ways in which people call it. The children of its longest list of modules are
regions, inside one around that list, and so are those of lists that lie as deep. Outputs, loss, gradients,
buffers and weights of both steps are compared. Libraries that are not installed are said, and left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import CheckpointError

from strategies.ac.nested import Nested
from strategies.base import StrategyError
from tests.matrix.architectures import Positional, library_of, makers, missing_libraries

STEPS = 2
_DROPOUT, _LEARNING_RATE, _SHORTER, _CLASSES = 0.1, 0.1, 7, 2

Outcome: TypeAlias = Literal["bitwise", "refused", "silent", "crashed", "plain model fails"]
Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword inputs of one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One way of training one architecture.

    Fields:
        architecture: library and name.
        way: how it is called.
        outcome: what became of it; a usage that the plain model fails at is not counted.
        regions: labelled modules.
        sentence: the refusal, the error, or what differs first.
    """

    architecture: str
    way: str
    outcome: Outcome
    regions: int = 0
    sentence: str = ""


def used(architecture: str) -> Iterator[Usage]:
    """Yield what becomes of each usage of an architecture."""
    model, batch = makers()[architecture]()
    inputs: tuple[Tensor, ...] = batch.inputs
    names: Sequence[str] = ()
    if isinstance(model, Positional) and library_of(architecture) == "transformers":
        names = model.names
        model = model.model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = _DROPOUT
    for way, given in ways(model, inputs, names).items():
        yield compared(Usage(architecture=architecture, way=way, outcome="bitwise"), model, given)


def ways(
    model: nn.Module, inputs: tuple[Tensor, ...], names: Sequence[str]
) -> dict[str, Callable[[int], Given]]:
    """Return the ways of calling a model, each with what it gives in a step.

    Args:
        model: the plain model.
        inputs: its inputs, (B, ...).
        names: their keywords; a model of `transformers` has such.
    """
    if not names:
        return {
            "plain": lambda _: (inputs, {}),
            "changing batches": lambda step: (tuple(each[: len(each) - step] for each in inputs), {}),
        }
    named = dict(zip(names, inputs, strict=True))
    first = inputs[0]
    found: dict[str, Callable[[int], Given]] = {
        "plain": lambda _: ((), named),
        "hidden states": lambda _: ((), {**named, "output_hidden_states": True}),
        "labels": lambda _: ((), {**named, "labels": _labels(model, first)}),
    }
    if first.is_floating_point():
        return {
            **found,
            "changing batches": lambda step: ((), {name: x[: len(x) - step] for name, x in named.items()}),
        }
    mask = torch.ones_like(first)
    mask[1:, -_SHORTER:] = 0
    lengths = {name: x.shape[1] for name, x in named.items()}
    return {
        **found,
        "padding mask": lambda _: ((), {**named, "attention_mask": mask}),
        "mask and labels": lambda _: ((), {**named, "attention_mask": mask, "labels": _labels(model, first)}),
        "changing lengths": lambda step: (
            (),
            {name: x[:, : lengths[name] - _SHORTER * step] for name, x in named.items()},
        ),
    }


def compared(row: Usage, model: nn.Module, given: Callable[[int], Given]) -> Usage:
    """Return what becomes of a usage.

    Args:
        row: its names.
        model: plain; copies of it are trained.
        given: inputs of a step.
    """
    labels = labels_of(model)
    row = replace(row, regions=len(labels))
    try:
        expected = trained(copy.deepcopy(model), given)
    except Exception as error:  # noqa: BLE001 (whatever the library does not support)
        return replace(row, outcome="plain model fails", sentence=f"{type(error).__name__}: {error}")
    try:
        actual = trained(Nested(labels=labels).apply(copy.deepcopy(model)), given)
    except (StrategyError, CheckpointError) as refusal:
        return replace(row, outcome="refused", sentence=str(refusal))
    except Exception as error:  # noqa: BLE001 (a crash is a result)
        return replace(row, outcome="crashed", sentence=f"{type(error).__name__}: {error}")
    first = next(
        (name for name in expected.keys() | actual.keys() if not _equal(name, expected, actual)), None
    )
    return row if first is None else replace(row, outcome="silent", sentence=f"{first} differs")


def labels_of(model: nn.Module) -> dict[str, list[int]]:
    """Return labels for the children of the longest list or sequence of modules, `[list, child]`.

    Lists that lie as deep as that get them too; where there is none, the children of the model do.
    """
    lists = dict(_lists(model, ""))
    if not lists:
        return {name: [0, at] for at, (name, _) in enumerate(model.named_children())}
    depth = min((-len(children), fqn.count(".")) for fqn, children in lists.items())[1]
    chosen = [(fqn, children) for fqn, children in lists.items() if fqn.count(".") == depth]
    return {
        f"{fqn}.{name}": [number, at]
        for number, (fqn, children) in enumerate(chosen)
        for at, name in enumerate(children)
    }


def trained(model: nn.Module, given: Callable[[int], Given]) -> dict[str, Any]:
    """Return all that some steps of training give: outputs, loss, gradients, buffers and weights, by name."""
    found: dict[str, Any] = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        model.zero_grad()
        args, kwargs = given(step)
        outputs = model(*args, **kwargs)
        leaves, structure = tree_flatten(outputs)
        loss = _loss(outputs)
        loss.backward()  # type: ignore[no-untyped-call]
        named = {
            "structure": structure,
            "loss": loss,
            **{f"output {at}": leaf for at, leaf in enumerate(leaves)},
            **{f"gradient of {name}": each.grad for name, each in model.named_parameters()},
            **{f"buffer {name}": each for name, each in model.named_buffers()},
        }
        found |= {
            f"step {step}: {name}": each.detach().clone() if isinstance(each, Tensor) else each
            for name, each in named.items()
        }
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=_LEARNING_RATE)
    return found | {f"weight {name}": each.detach() for name, each in model.named_parameters()}


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield FQN and names of the children of each outermost list or sequence of modules."""
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        children = dict(child.named_children())
        are_called = all(type(each).forward is not nn.Module.forward for each in children.values())
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(children) > 1 and are_called:
            yield fqn, list(children)
        else:
            yield from _lists(child, f"{fqn}.")


def _labels(model: nn.Module, first: Tensor) -> Tensor:
    if not first.is_floating_point():
        return first
    if "Segmentation" in type(model).__name__:
        return torch.zeros(len(first), *first.shape[2:], dtype=torch.long)
    return torch.arange(len(first)) % _CLASSES


def _loss(outputs: Any) -> Tensor:
    own = getattr(outputs, "loss", None)
    parts = [
        leaf.square().mean()
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return own if isinstance(own, Tensor) else torch.stack(parts).sum()


def _equal(name: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    if name not in expected or name not in actual:
        return False
    left, right = expected[name], actual[name]
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)  # (NaN would be no training)
    return type(left) is type(right) and bool(left == right)


ROW = Usage(architecture="library/Name", way="plain", outcome="bitwise")
_BEFORE: list[Tensor] = []


class Layered(nn.Module):
    """Two blocks, and what is done to the input of the second."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.single = nn.Sequential(nn.Linear(3, 3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.single(self.layers[1](self.between(self.layers[0](x))))  # type: ignore[no-any-return]


def remembered(x: Tensor) -> Tensor:
    """Add what the call before got, a list that nobody puts back."""
    _BEFORE.append(x.detach())
    return x * (1 + sum(_BEFORE)) if len(_BEFORE) % 3 else x


class Failing(nn.Linear):
    """Fails where a region runs again."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise LookupError
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    ("between", "outcome"),
    [
        pytest.param(torch.tanh, "bitwise", id="a function"),
        pytest.param(lambda x: x.view(-1, 7), "plain model fails", id="an error"),
        pytest.param(lambda x: x.add_(1) if x.sum() < 9e9 else x, "bitwise", id="a change in place"),
        pytest.param(remembered, "silent", id="a global"),
    ],
)
def test_what_becomes_of_a_usage(between: Callable[[Tensor], Tensor], outcome: Outcome) -> None:
    found = compared(ROW, Layered(between), lambda _: ((torch.ones(2, 3),), {}))
    assert (found.outcome, found.regions) == (outcome, 2)


def test_an_error_in_backward_is_a_crash() -> None:
    model = Layered(torch.tanh)
    model.layers[0] = Failing(3, 3)
    found = compared(ROW, model, lambda _: ((torch.ones(2, 3),), {}))
    assert (found.outcome, found.sentence) == ("crashed", "LookupError: ")


def test_the_children_of_outermost_lists_are_labelled() -> None:
    assert labels_of(Layered(torch.tanh)) == {"layers.0": [0, 0], "layers.1": [0, 1]}


WAYS = ("plain", "hidden states", "labels", "padding mask", "mask and labels", "changing lengths")


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name == "transformers/DistilBertConfig" else [pytest.mark.matrix])
        for name in makers()
    ],
)
def test_an_architecture_is_equal_bit_for_bit_in_every_way(architecture: str) -> None:
    library = library_of(architecture)
    if library in missing_libraries():
        pytest.skip(f"needs {library}")
    found = {row.way: (row.outcome, row.sentence) for row in used(architecture)}
    assert architecture != "transformers/DistilBertConfig" or found.keys() == {*WAYS}
    outcomes = {way: each for way, each in found.items() if each[0] != "plain model fails"}
    assert outcomes == dict.fromkeys(outcomes, ("bitwise", ""))
