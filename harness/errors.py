"""Errors of the harness.

ValueError
└── ConfigError               the configuration is wrong; raised before any process starts
    ├── MissingPackageError   what was asked for needs a package of an extra
    ├── UnplannedError        a defect of ours kept one point of a sweep from being planned
    └── PredictedOomError     a point is predicted not to fit, and is not to run then
SystemExit
└── Terminated                somebody ended this process; no refusal, whoever's code was running
BaseException
└── LateError                 an alarm: the user's code has not returned in time
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType


class ConfigError(ValueError):
    """The configuration cannot be run as asked.

    Args:
        where: the configuration path the user can change (`mesh.tp`).
        problem: what is wrong, with the value, and what would be right.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class MissingPackageError(ConfigError):
    """A package is not installed that an extra of ours installs."""


class UnplannedError(ConfigError):
    """A defect of ours kept one point of a sweep from being planned; the command ends with 1."""


class PredictedOomError(ConfigError):
    """A point is predicted not to fit the hardware, and `skip_predicted_oom` leaves it unrun; a result."""


class Terminated(SystemExit):
    """SIGTERM, as an exception that unwinds like Ctrl-C does."""

    passes_user_code = True


class LateError(BaseException):
    """The alarm of the user's code; no `except Exception` of theirs takes it for its own."""

    passes_user_code = True


def require_at_least(where: str, value: float, low: float) -> None:
    """Refuse a number below `low`."""
    if value < low:
        raise ConfigError(where, f"must be at least {low}, got {value}")


def require_at_most(where: str, value: float, high: float) -> None:
    """Refuse a number above `high`."""
    if value > high:
        raise ConfigError(where, f"must be at most {high}, got {value}")


def require_fraction(where: str, value: float) -> None:
    """Refuse a probability outside [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(where, f"must be in [0, 1), got {value}")


def require_one_of(where: str, value: str, options: Sequence[str]) -> None:
    """Refuse a word that is not one of `options`."""
    if value not in options:
        raise ConfigError(where, f"must be one of {', '.join(options)}, got {value!r}")


def optional_package(name: str, *, where: str, extra: str) -> ModuleType:
    """Return a package that an extra of ours installs.

    Args:
        name: name of the package, as it is imported.
        where: option that needs the package.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        problem = f"needs the package {error.name!r}; install it with: pip install 'acbench[{extra}]'"
        raise MissingPackageError(where, problem) from error
