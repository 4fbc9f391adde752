"""A function of the user's that an option names: found, called with its arguments, and refused in words."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature, unwrap
from pathlib import Path
from typing import Any

import torch

from strategies import last_words, user_sources
from strategies.base import StrategyError

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFunction:
    """A function of the user's, named by the option `<group>.factory`; `<group>.kwargs` are its arguments.

    Fields:
        name: `package.module:function`, importable, or below the current folder.
        group: the configuration group, `model` or `ac`.
        given: number of its first arguments that we give.
        refused: class of the errors, made of the option and the problem.
    """

    name: str
    group: str
    given: int = 0
    refused: Callable[[str, str], Exception] = StrategyError

    @property
    def where(self) -> str:
        """The option that names it."""
        return f"{self.group}.factory"

    def check_name(self) -> None:
        """Refuse what is no `package.module:function`.

        Raises:
            `refused`: naming the option.
        """
        module, colon, function = self.name.partition(":")
        if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise self.refused(self.where, f"must be 'package.module:function', got {self.name!r}")

    def load(self) -> Callable[..., Any]:
        """Return the function, looked for in the working folder too.

        Raises:
            `refused`: it cannot be imported, or is nothing that can be called.
        """
        module, _, function = self.name.partition(":")
        folder = str(Path.cwd())
        if folder not in sys.path:  # an installed command does not look here by itself
            sys.path.append(folder)
        try:
            # a model may be made without memory now: tensors of the file are no part of it
            with torch.device("cpu"):
                found = getattr(importlib.import_module(module), function, None)
        except ImportError as error:
            taken = user_sources.taken_name(error.name or module)
            if module.endswith(".py"):
                named = module.removesuffix(".py").replace("/", ".").strip(".")
                taken = f"; a module has no ending and no folders: write {named}:{function}"
            problem = f"cannot import {module!r}: {last_words.last_words(error).message}{taken}"
            raise self.refused(self.where, problem) from error
        except BaseException as error:
            if passes(error):
                raise
            words = last_words.last_words(error)
            problem = f"cannot import {module!r}: {words.kind}: {words.message}"
            raise self.refused(self.where, problem) from error
        if not callable(found):
            raise self.refused(self.where, f"module {module!r} has no function {function!r}")
        made: Callable[..., Any] = found
        return made

    def call(self, function: Callable[..., Any], *given: Any, **arguments: Any) -> Any:
        """Return what the function returns.

        Raises:
            `refused`: it raises, or ends the process.
            MemoryError, torch.OutOfMemoryError: memory is short, which is no defect of the function.
        """
        try:
            return function(*given, **arguments)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except SystemExit as error:
            if passes(error):
                raise
            problem = f"{self.name!r} exited with status {last_words.last_words(error).message or None}"
            raise self.refused(self.where, problem) from error
        except BaseException as error:
            if passes(error):
                raise
            words = last_words.last_words(error)
            problem = f"{self.name!r} raised {words.kind}: {words.message}"
            missing = self._missing(function, arguments)
            raise self.refused(self.where, f"{problem}{missing}") from error

    def modules(self) -> list[str]:
        """Return the modules that the option names and that define the function, which may be two.

        Raises:
            `refused`: as of `load`.
        """
        function = unwrap(_without_arguments(self.load()))
        defined_in = getattr(function, "__module__", None) or type(function).__module__
        return [self.name.partition(":")[0], defined_in]

    def check_arguments(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that the function does not take by name.

        Raises:
            `refused`: naming the first.
        """
        names = self.names(function)
        if names is None:
            return
        for name in arguments:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                takes = f"it takes: {', '.join(names)}" if names else "it takes none"
                problem = f"{self.name!r} has no such argument; {meant}{takes}"
                raise self.refused(f"{self.group}.kwargs.{name}", problem)

    def names(self, function: Callable[..., Any]) -> list[str] | None:
        """Return the names of the arguments that options may give; `None` where any name is taken."""
        try:
            parameters = [*signature(function).parameters.values()]
        except ValueError:  # some builtins do not tell
            return None
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return [parameter.name for parameter in parameters[self.given :] if parameter.kind in _NAMED]

    def _missing(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        try:
            parameters = [*signature(function).parameters.values()][self.given :]
        except ValueError:  # some builtins do not tell
            return ""
        groups = {"dropout": "model"} if self.group == "model" else {}
        required = [
            each.name for each in parameters if each.default is Parameter.empty and each.kind in _NAMED
        ]
        absent = [
            f"{groups.get(name, f'{self.group}.kwargs')}.{name}=…"
            for name in required
            if name not in arguments
        ]
        return f"; give it {' '.join(absent)}" if absent else ""


def passes(error: BaseException) -> bool:
    """Say if an exception is a signal to this process, no error of the function that it interrupts."""
    return getattr(type(error), "passes_user_code", False) is True


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of what a function takes by name."""
    try:
        parameters = signature(function).parameters.values()
    except ValueError:  # some builtins do not tell
        return {}
    return {each.name: each.default for each in parameters if each.default is not Parameter.empty}


def _without_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    return _without_arguments(function.func) if isinstance(function, partial) else function
