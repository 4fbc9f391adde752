"""The user's factory: found, called with its arguments, and asked what its model reads."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from harness.errors import ConfigError
from harness.models.parts.given_inputs import GivenInputs, given_inputs, seeded
from strategies.user_function import UserFunction, defaults

_SHAPES = "must return a module, or (module, example_inputs, loss_fn)"


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
        """Return the user's function. Raises ConfigError: it cannot be imported."""
        return self.user().load()

    def user(self) -> UserFunction:
        """Return the function by its name."""
        return UserFunction(name=self.factory, group="model", refused=ConfigError)

    def make(self) -> tuple[nn.Module, GivenInputs | None]:
        """Return a new module on the current default device, and what it reads; `None` for tokens.

        Raises:
            ConfigError: the factory cannot be imported or called, or it returns something else.
        """
        function = self.function()
        made = _called(self.user(), function, self._arguments(function))
        match made:
            case nn.Module():
                return made, None
            case (nn.Module() as model, inputs, loss_fn) if callable(loss_fn):
                return model, given_inputs(model, inputs, loss_fn)
        raise ConfigError("model.factory", f"{_SHAPES}, got {type(made).__name__} from {self.factory!r}")

    def replaced(self) -> tuple[str, ...]:
        """Return the default of the factory that `dropout` replaces, in words; nothing where it has none."""
        own = defaults(self.function()).get("dropout", self.dropout)
        return () if self.dropout is None or own == self.dropout else (f"dropout: {own} -> {self.dropout}",)

    def _arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        given: dict[str, Any] = json.loads(self.arguments)
        if "dropout" in given:
            raise ConfigError("model.kwargs.dropout", "is set by model.dropout; set that")
        self.user().check_arguments(function, given)
        if self.dropout is None:
            return given
        names = self.user().names(function)
        if names is not None and "dropout" not in names:
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


def _called(user: UserFunction, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return what the user's code makes: on the meta device if it can, otherwise on CPU."""
    try:
        return user.call(function, **arguments)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, SystemExit):
            raise
        if torch.get_default_device().type == "meta":  # a constructor that reads values, as with `.item()`
            with torch.device("cpu"):
                return _called(user, function, arguments)
        if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
            problem = f"{user.name!r} reads values of tensors, which a prediction has not: {cause.func}"
            remedy = "take them from Python's own numbers, or run the trial, which measures"
            raise ConfigError("model.factory", f"{problem}{_place(cause)}; {remedy}") from cause
        raise


def _place(error: BaseException) -> str:
    others = (Path(torch.__file__).parent, Path(__file__).parents[3] / "strategies")
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(code, line) for code, line in frames if not {*others} & {*Path(code.co_filename).parents}]
    code, line = users[-1]
    return f" ({Path(code.co_filename).name}, line {line}, in {code.co_name})"
