"""The user's factory: found, called with its arguments, and asked what its model reads."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from harness.errors import ConfigError, LateError, Terminated
from harness.last_words import last_words
from harness.models.parts import sources
from harness.models.parts.given_inputs import GivenInputs, given_inputs, seeded

_SHAPES = "must return a module, or (module, example_inputs, loss_fn)"
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class FactoryCall:
    """A call of a user's factory.

    Fields:
        factory: `package.module:function`.
        dropout: argument of a factory that takes `dropout`; `None` leaves it to the factory.
        arguments: further arguments by name, as JSON.
    """

    factory: str
    dropout: float | None
    arguments: str

    @classmethod
    def of(cls, factory: str, dropout: float | None, arguments: Mapping[str, Any]) -> FactoryCall:
        """Return the call of `factory` with `arguments`."""
        return cls(factory=factory, dropout=dropout, arguments=json.dumps(arguments))

    def function(self) -> Callable[..., Any]:
        """Return the user's function.

        Raises:
            ConfigError: it cannot be imported.
        """
        return _imported(self.factory)

    def make(self) -> tuple[nn.Module, GivenInputs | None]:
        """Return a new module on the current default device, and what it reads; `None` for tokens.

        Raises:
            ConfigError: the factory cannot be imported or called, or it returns something else.
        """
        function = self.function()
        made = _called(self.factory, function, self._arguments(function))
        match made:
            case nn.Module():
                return made, None
            case (nn.Module() as model, inputs, loss_fn) if callable(loss_fn):
                return model, given_inputs(model, inputs, loss_fn)
        raise ConfigError("model.factory", f"{_SHAPES}, got {type(made).__name__} from {self.factory!r}")

    def replaced(self) -> tuple[str, ...]:
        """Return the default of the factory that `dropout` replaces, in words; nothing where it has none."""
        own = _defaults(self.function()).get("dropout", self.dropout)
        return () if self.dropout is None or own == self.dropout else (f"dropout: {own} -> {self.dropout}",)

    def _arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments of the call, all of which the factory takes."""
        names, takes_any = _parameters(function)
        given: dict[str, Any] = json.loads(self.arguments)
        for name in given:
            if name == "dropout":
                raise ConfigError("model.kwargs.dropout", "is set by model.dropout; set that")
            if name not in names and not takes_any:
                raise ConfigError(f"model.kwargs.{name}", _no_argument(self.factory, name, names))
        if self.dropout is None:
            return given
        if "dropout" not in names and not takes_any:
            problem = f"must be null, the factory takes no `dropout`, got {self.dropout}"
            raise ConfigError("model.dropout", problem)
        return {**given, "dropout": self.dropout}


def inputs_of(call: FactoryCall, seed: int = 0, device: str = "cpu") -> GivenInputs | None:
    """Return what the model of `call` reads, made once a process for each seed and device.

    A loss function may close over targets that belong to its inputs, or over its module. So a module is
    trained with the loss of its own call, and random numbers start here as there: both make one example.
    On the `meta` device nothing takes memory, and tensors have no values.

    Raises:
        ConfigError: as `FactoryCall.make`; or the factory returns one module for every call.
    """
    _, given = _first(call)
    return _made(call, *((0, "meta") if given is None else (seed, device)))


@functools.cache
def _first(call: FactoryCall) -> tuple[ref[nn.Module], GivenInputs | None]:
    """Return the first model of `call`, which has no memory, and what it reads.

    The model is not kept: whoever gives the same one each time keeps it.
    """
    with seeded(0), torch.device("meta"):
        model, given = call.make()
    return ref(model), given


@functools.cache
def _made(call: FactoryCall, seed: int, device: str) -> GivenInputs | None:
    """Return what another model of `call` reads."""
    with seeded(seed), torch.device(device):
        other, made = call.make()
    if _first(call)[0]() is other:
        problem = f"{call.factory!r} returns the same module each time; each model of a trial is a new one"
        raise ConfigError("model.factory", f"{problem}: make it inside of the function")
    return made


def _imported(factory: str) -> Callable[..., Any]:
    """Return the function that a factory names, looked for in the working folder too."""
    module, _, function = factory.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # an installed command does not look here by itself
        sys.path.append(folder)
    try:
        with torch.device(
            "cpu"
        ):  # whoever makes a model without memory: tensors of the file are no part of it
            found = getattr(importlib.import_module(module), function, None)
    except (Terminated, LateError):
        raise
    except ImportError as error:
        taken = sources.taken_name(error.name or module)
        if module.endswith(".py"):
            named = module.removesuffix(".py").replace("/", ".").strip(".")
            taken = f"; a module has no ending and no folders: write {named}:{function}"
        problem = f"cannot import {module!r}: {last_words(error).message}{taken}"
        raise ConfigError("model.factory", problem) from error
    except BaseException as error:
        words = last_words(error)
        problem = f"cannot import {module!r}: {words.kind}: {words.message}"
        raise ConfigError("model.factory", problem) from error
    if not callable(found):
        raise ConfigError("model.factory", f"module {module!r} has no function {function!r}")
    made: Callable[..., Any] = found
    return made


def _called(factory: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return what the user's code makes: on the meta device if it can, otherwise on CPU."""
    try:
        return function(**arguments)
    except (MemoryError, torch.OutOfMemoryError, Terminated, LateError):
        raise
    except SystemExit as error:
        problem = f"{factory!r} exited with status {last_words(error).message or None}"
        raise ConfigError("model.factory", problem) from error
    except BaseException as error:
        if torch.get_default_device().type == "meta":  # a constructor that reads values, as with `.item()`
            with torch.device("cpu"):
                return _called(factory, function, arguments)
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            problem = f"{factory!r} reads values of tensors, which a prediction has not: {error.func}"
            remedy = "take them from Python's own numbers, or run the trial, which measures"
            raise ConfigError("model.factory", f"{problem}{_place(error)}; {remedy}") from error
        words = last_words(error)
        problem = f"{factory!r} raised {words.kind}: {words.message}{_missing(function, arguments)}"
        raise ConfigError("model.factory", problem) from error


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error has passed."""
    others = (Path(torch.__file__).parent, Path(__file__).parents[3] / "strategies")
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(code, line) for code, line in frames if not {*others} & {*Path(code.co_filename).parents}]
    code, line = users[-1]
    return f" ({Path(code.co_filename).name}, line {line}, in {code.co_name})"


def _missing(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Say how to give what a function requires and does not get."""
    try:
        required = [each.name for each in signature(function).parameters.values() if _is_required(each)]
    except ValueError:  # some builtins do not tell
        return ""
    groups = {"dropout": "model"}
    absent = [f"{groups.get(name, 'model.kwargs')}.{name}=…" for name in required if name not in arguments]
    return f"; give it {' '.join(absent)}" if absent else ""


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind in _NAMED


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of the arguments that a function takes by name, and whether it takes any name."""
    try:
        parameters = signature(function).parameters.values()
    except ValueError:  # some builtins do not tell
        return [], True
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    return [parameter.name for parameter in parameters if parameter.kind in _NAMED], takes_any


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of what a function takes by name."""
    try:
        parameters = signature(function).parameters.values()
    except ValueError:  # some builtins do not tell
        return {}
    return {each.name: each.default for each in parameters if each.default is not Parameter.empty}


def _no_argument(factory: str, name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    takes = f"it takes: {', '.join(names)}" if names else "it takes none"
    return f"{factory!r} has no such argument; {meant}{takes}"
