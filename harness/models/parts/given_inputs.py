"""Inputs that a user's factory gives its model: one example, a batch function, or a dataset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch.utils has no public name for it
from torch.utils.data import IterableDataset, default_collate

from harness.errors import ConfigError
from harness.models.base import Batch
from strategies import generators
from strategies.last_words import last_words

_PAIR = "(inputs, targets)"
SEEDS = 1 << 32
"""Number of seeds; NumPy takes no more."""

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GivenInputs:
    """The inputs of the model, and what is asked of its outputs.

    Fields:
        loss_fn: function of the outputs, and of the targets where batches are drawn; returns a scalar.
        example: the one batch of every step; `None` where batches are drawn.
        draw: function of a number of samples, which returns inputs and targets with so many rows.
        forward: the signature of the model's `forward`.
    """

    loss_fn: Callable[..., Any]
    example: Batch | None
    draw: Callable[[int], Any] | None
    forward: Signature

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of a step. Raises ConfigError: it is no real scalar."""
        loss = self.loss_fn(outputs) if self.draw is None else self.loss_fn(outputs, batch.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"a {tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError("model.factory", f"loss_fn must return a real scalar tensor, got {got}")
        return loss

    def batch(self, count: int, seed: int, *, device: str = "cpu") -> Batch:
        """Return `count` samples of the batch function or dataset.

        Args:
            count: samples, >= 1.
            device: default device meanwhile; of a dataset `meta` asks for one sample.

        Raises:
            ConfigError: it fails, or returns something else.
        """
        assert self.draw is not None, "one example is not drawn"
        with seeded(seed), torch.device(device):
            try:
                drawn = self.draw(count)
            except Exception as error:
                words = last_words(error)
                problem = f"its batch of {count} raised {words.kind}: {words.message}"
                raise ConfigError("model.factory", problem) from error
        if not (isinstance(drawn, tuple | list) and len(drawn) == len(("inputs", "targets"))):
            problem = f"a batch function must return {_PAIR}, got {_said(drawn)}"
            raise ConfigError("model.factory", problem)
        inputs, keywords = _bound(self.forward, drawn[0])
        batch = Batch(inputs=inputs, keywords=keywords, targets=drawn[1])
        _require_leaves(batch)
        require_rows(batch, count, "model.factory", "a batch of the factory")
        return batch


def given_inputs(model: nn.Module, given: Any, loss_fn: Callable[..., Any]) -> GivenInputs:
    """Return what a factory gives besides its module.

    Args:
        given: a tuple of positional inputs; a mapping of inputs by name; a function of the batch size that
            returns (inputs, targets); or a dataset of such pairs, with a length and an item for each index.
        loss_fn: function of outputs, and of targets where there are some.

    Raises:
        ConfigError: `given` is none of these, or does not fit `forward`.
    """
    forward = _signature(model)
    if isinstance(given, tuple | Mapping):
        inputs, keywords = _bound(forward, given)
        example = Batch(inputs=inputs, keywords=keywords, targets=None)
        _require_leaves(example)
        _require_copies(example)
        return GivenInputs(loss_fn=loss_fn, example=example, draw=None, forward=forward)
    draw = _drawing(given)
    return GivenInputs(loss_fn=loss_fn, example=None, draw=draw, forward=forward)


def require_rows(batch: Batch, count: int, where: str, what: str) -> None:
    """Refuse a batch with a tensor that has not `count` rows: it could not be shared out.

    Raises:
        ConfigError: naming the tensor.
    """
    for name, tensor in tensors_of(batch):
        if not tensor.dim() or tensor.size(0) != count:
            problem = f"every tensor of {what} needs a row for each of {count} samples, but {name} has"
            raise ConfigError(where, f"{problem} shape {tuple(tensor.shape)}")


def require_open_loss(loss_fn: Callable[..., Any], count: int, where: str) -> None:
    """Refuse a loss that closes over a tensor of `count` rows, which belong to the whole example.

    Raises:
        ConfigError: naming the variable.
    """
    names = getattr(getattr(loss_fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(loss_fn, "__closure__", None) or (), strict=True):
        held = cell.cell_contents
        if isinstance(held, Tensor) and held.dim() and held.size(0) == count:
            problem = f"the loss reads {name!r}, which has a row for each sample of the whole example"
            raise ConfigError(where, f"{problem}; give a batch function or a dataset with targets instead")


def _signature(model: nn.Module) -> Signature:
    try:
        return signature(model.forward)
    except ValueError:  # what is compiled does not tell
        return signature(lambda *inputs, **keywords: (inputs, keywords))


def _drawing(given: Any) -> Callable[[int], Any]:
    if isinstance(given, IterableDataset):
        problem = f"a {type(given).__name__} has no rows to choose from"
        raise ConfigError("model.factory", f"{problem}; give a dataset with an index, or a batch function")
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, Tensor | str):
        return lambda count: _collated(given, count)
    if callable(given) and not isinstance(given, nn.Module | type):
        draw: Callable[[int], Any] = given
        return draw
    problem = "the second of three must be a tuple or a mapping of inputs, a batch function or a dataset"
    raise ConfigError("model.factory", f"{problem}, got {_said(given)}")


def _collated(dataset: Any, count: int) -> Any:
    """Return `count` samples of a dataset at random places, or as many empty ones like its first."""
    if torch.get_default_device().type == "meta":
        inputs, targets = default_collate([tuple(_pair(dataset[0]))])
        empty = Batch(inputs=(inputs,), targets=targets).empty(count)
        return empty.inputs[0], empty.targets
    places = torch.randint(len(dataset), (count,)).tolist()
    return default_collate([tuple(_pair(dataset[place])) for place in places])


def _pair(item: Any) -> Any:
    if not (isinstance(item, tuple | list) and len(item) == len(("inputs", "targets"))):
        raise TypeError(f"an item of the dataset must be {_PAIR}, got {_said(item)}")
    return item


def _bound(forward: Signature, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs by position as far as they have one, and by name.

    What plans a forward works with positions, so names are translated where `forward` allows it.
    """
    if isinstance(given, tuple | list):
        return tuple(given), {}
    if not isinstance(given, Mapping):
        return (given,), {}
    try:
        return by_position(forward, given)
    except TypeError as error:
        raise ConfigError("model.factory", f"its inputs do not fit forward: {error}") from error


def by_position(forward: Signature, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs by position where all of them have one, gaps filled with defaults; else all by name.

    Raises:
        TypeError: `forward` does not take them.
    """
    bound = forward.bind(**given)
    parameters = [forward.parameters[name] for name in bound.arguments]
    if any(parameter.kind not in _BY_POSITION for parameter in parameters):
        return (), {str(name): value for name, value in given.items()}
    bound.apply_defaults()
    last = list(bound.arguments).index(parameters[-1].name) if parameters else -1
    return tuple(bound.arguments.values())[: last + 1], {}


def tensors_of(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their names."""
    for name in ("inputs", "keywords", "targets"):
        leaves, _ = pytree.tree_flatten_with_path(getattr(batch, name))
        yield from (
            (f"{name}{pytree.keystr(path)}", leaf) for path, leaf in leaves if isinstance(leaf, Tensor)
        )


def _require_leaves(batch: Batch) -> None:
    for name, tensor in tensors_of(batch):
        if tensor.requires_grad and not tensor.is_leaf:
            problem = f"{name} has a history that ends outside of the step; give `.detach().requires_grad_()`"
            raise ConfigError("model.factory", problem)


def _require_copies(example: Batch) -> None:
    try:
        copy.deepcopy((example.inputs, dict(example.keywords)))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        problem = (
            f"its inputs cannot be copied, and each step needs a copy of its own: {last_words(error).message}"
        )
        raise ConfigError("model.factory", problem) from error


def _said(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators that a user may draw from, and leave them as they were."""
    with generators.restored():
        generators.seed(seed)
        yield
