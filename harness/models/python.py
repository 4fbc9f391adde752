"""The user's own module, made by a function of theirs."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature, unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import ConfigError, Terminated
from harness.models.base import Batch, LanguageModelSpec, ModelSpec
from harness.models.parts import containers, sources

if TYPE_CHECKING:
    from torch import Tensor, nn

_SHAPES = "must return a module, or (module, example_inputs, loss_fn)"


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonSpec(LanguageModelSpec):
    """A module that a user's factory returns.

    The factory takes no arguments, or `dropout` alone. It returns the module, which then maps tokens
    (B, S) to logits (B, S, V); or `(module, example_inputs, loss_fn)`, where `example_inputs` is the
    tuple of positional inputs of every step and `loss_fn(outputs)` a scalar on the device of `outputs`.

    Fields:
        layers_fqn: FQN of the container of the blocks; empty when there is none.
        vocab_size: number of tokens V that the module takes; unused with example inputs.
        dropout: argument of a factory that takes `dropout`; refused when positive and the factory takes none.
        factory: `package.module:function`, importable, or below the current folder.
        tp_column: FQN patterns of linears that tensor parallelism splits by column.
        tp_row: FQN patterns of linears that tensor parallelism splits by row.
    """

    factory: str
    tp_column: tuple[str, ...]
    tp_row: tuple[str, ...]

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        module, colon, function = self.factory.partition(":")
        if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ConfigError("model.factory", f"must be 'package.module:function', got {self.factory!r}")

    def build(self) -> nn.Module:
        """Return the factory's module.

        Raises:
            ConfigError: the factory cannot be imported or called, it returns something else, or
                `layers_fqn` names no container of blocks.
        """
        model, _ = _make(self.factory, self.dropout)
        containers.require_container(model, self.layers_fqn)
        return model

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of the factory's `loss_fn`, or the mean cross entropy if there is none."""
        if batch.targets is not None:
            return LanguageModelSpec.loss(self, outputs, batch)
        example = _example(self.factory, self.dropout)
        assert example is not None, "a batch without targets is the factory's own"
        return example.loss_fn(outputs)

    def files(self) -> tuple[Path, ...]:
        """Return the user's source files that make the model."""
        return _files(self.factory, self.dropout)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the linears of `tp_column` and `tp_row`."""
        return dict.fromkeys(self.tp_column, "column") | dict.fromkeys(self.tp_row, "row")

    def fixed_batch(self) -> Batch | None:
        """Return the factory's example inputs, the same in every process."""
        example = _example(self.factory, self.dropout)
        return None if example is None else Batch(inputs=example.inputs, targets=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Example:
    inputs: tuple[Any, ...]
    loss_fn: Callable[[Any], Tensor]


@functools.cache
def _example(factory: str, dropout: float) -> _Example | None:
    """Return the example of `factory`, made once a process on CPU from a fixed seed.

    A loss function may close over targets that belong to its inputs, so both come from one call.
    """
    with torch.device("meta"):
        _, example = _make(factory, dropout)
    if example is None:
        return None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        _, example = _make(factory, dropout)
    return example


@functools.cache
def _files(factory: str, dropout: float) -> tuple[Path, ...]:
    """Return the user's files behind `factory`. It runs first, because it may import modules as it runs."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model, _ = _make(factory, dropout)
    function = unwrap(_without_arguments(_import(factory)))
    defined_in = getattr(function, "__module__", None) or type(function).__module__
    classes = {type(module).__module__ for module in model.modules()}
    return sources.user_files([factory.partition(":")[0], defined_in, *classes])


def _without_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    return _without_arguments(function.func) if isinstance(function, functools.partial) else function


def _make(factory: str, dropout: float) -> tuple[nn.Module, _Example | None]:
    function = _import(factory)
    made = _call(factory, function, _arguments(function, dropout))
    match made:
        case torch.nn.Module():
            return made, None
        case (torch.nn.Module() as model, tuple() as inputs, loss_fn) if callable(loss_fn):
            return model, _Example(inputs=inputs, loss_fn=loss_fn)
    raise ConfigError("model.factory", f"{_SHAPES}, got {type(made).__name__} from {factory!r}")


def _import(factory: str) -> Callable[..., Any]:
    module, _, function = factory.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # an installed command does not look here by itself
        sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Terminated:
        raise
    except ImportError as error:
        raise ConfigError("model.factory", f"cannot import {module!r}: {error}") from error
    except (Exception, SystemExit) as error:
        problem = f"cannot import {module!r}: {type(error).__name__}: {error}"
        raise ConfigError("model.factory", problem) from error
    if not callable(found):
        raise ConfigError("model.factory", f"module {module!r} has no function {function!r}")
    made: Callable[..., Any] = found
    return made


def _call(factory: str, function: Callable[..., Any], arguments: dict[str, float]) -> Any:
    """Return what the user's code makes: on the meta device if it can, otherwise on CPU."""
    try:
        return function(**arguments)
    except (MemoryError, torch.OutOfMemoryError, Terminated):
        raise
    except SystemExit as error:
        raise ConfigError("model.factory", f"{factory!r} exited with status {error.code}") from error
    except Exception as error:
        if torch.get_default_device().type == "meta":  # a constructor that reads values, as with `.item()`
            with torch.device("cpu"):
                return _call(factory, function, arguments)
        raise ConfigError("model.factory", f"{factory!r} raised {type(error).__name__}: {error}") from error


def _arguments(function: Callable[..., Any], dropout: float) -> dict[str, float]:
    try:
        takes_dropout = "dropout" in signature(function).parameters
    except ValueError:  # some builtins do not tell
        takes_dropout = False
    if takes_dropout:
        return {"dropout": dropout}
    if dropout > 0:
        raise ConfigError("model.dropout", f"must be 0, the factory takes no `dropout`, got {dropout}")
    return {}
