"""Models of other people under `ac=nested`, trained beside the plain model: equal bit for bit, or refused.

Each architecture is small, has random weights and dropout of 0.1 in every `nn.Dropout`, and is trained for
two steps in each of the ways in which people call it. The children of its longest list of modules are
regions, inside one around that list, and so are those of lists that lie as deep. Outputs, loss, gradients,
buffers and weights of both steps are compared. Libraries that are not installed are said, and left out.

    python -m bench.nested --part nested_models [--matching Llama]
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import CheckpointError

from bench.architectures import Positional, library_of, makers, missing_libraries
from bench.output import parser, publish
from bench.table import table_of
from strategies.ac.nested import Nested
from strategies.base import StrategyError

TARGET = 0.98
"""Share of the usages that shall be equal bit for bit."""

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


def main(words: Sequence[str]) -> int:
    """Train all, print the table, write the JSON; return 1 where the target is missed or one is wrong."""
    made = parser(__doc__, "nested_models", "nested")
    made.add_argument("--matching", default="", help="only architectures whose name contains this")
    chosen = made.parse_args(words)
    torch.set_num_threads(1)
    missing = missing_libraries()
    names = [name for name in makers() if library_of(name) not in missing and chosen.matching in name]
    rows = [row for name in names for row in used(name)]
    counted = [row for row in rows if row.outcome != "plain model fails"]
    publish(
        Group(_table(rows), *_sentences(rows, missing)),
        chosen.out,
        protocol={
            "architectures": names,
            "missing": missing,
            "steps": STEPS,
            "dropout": _DROPOUT,
            "torchvision": "without its compiled operators, where it was not built for this torch",
            "target": TARGET,
        },
        results=[asdict(row) for row in rows],
    )  # fmt: skip
    return int(not is_as_claimed(counted))


def is_as_claimed(rows: Sequence[Usage]) -> bool:
    """Whether enough are equal bit for bit, and none is silently another or crashes."""
    outcomes = Counter(row.outcome for row in rows)
    is_safe = not outcomes["silent"] and not outcomes["crashed"]
    return is_safe and outcomes["bitwise"] >= TARGET * len(rows)


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


def _sentences(rows: Sequence[Usage], missing: Sequence[str]) -> Iterator[str]:
    counts = Counter((library_of(row.architecture), row.outcome) for row in rows)
    yield from (f"{library}: {count} {outcome}" for (library, outcome), count in counts.items())
    yield f"not installed: {', '.join(missing) or 'none'}"


def _table(rows: Sequence[Usage]) -> Table:
    return table_of(
        rows,
        {
            "architecture": "architecture",
            "called with": "way",
            "regions": "regions",
            "outcome": "outcome",
            "sentence": lambda row: row.sentence[:120],
        },
    )
