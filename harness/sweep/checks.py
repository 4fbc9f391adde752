"""Questions that are asked of a model before its trial, in a process that has imported torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.models.base import ModelSpec
from harness.models.python import Made, PythonSpec
from harness.predict import views
from harness.ranks.assistant import AssistantEndedError, LateAnswerError
from harness.sweep.planning_log import planning_shown
from harness.trial import preflight
from strategies import StrategyError

if TYPE_CHECKING:
    from strategies.regions.block_search import FoundBlocks  # which needs torch

T = TypeVar("T")

_SLACK_S = 60.0
"""Seconds that a process gets beyond the time of the user's code: for what it imports, and to come back."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Asks in a fork of the agent's server, so that nothing that a user's factory does can end the driver.

    Fields:
        call: calls a function there, as `Agent.call` does.
        is_for_users_code: whether it is asked about models that run the user's code only, and this process
            about all others.
    """

    call: Callable[..., Any]
    is_for_users_code: bool = False

    def refusal(self, check: str, deadline_s: float, model: ModelSpec, *others: Any) -> preflight.Refusal:
        """Return what `preflight.built_refusal` returns; the end of the process is a refusal, too."""
        return self._asked(refusal, deadline_s, check, deadline_s, model, *others)

    def made(self, deadline_s: float, model: PythonSpec) -> Made | preflight.Refusal:
        """Return what `preflight.made_by_user` returns; the end of the process is a refusal, too."""
        return self._asked(preflight.made_by_user, deadline_s, deadline_s, model)

    def blocks(self, deadline_s: float, model: ModelSpec) -> FoundBlocks | None:
        """Return the blocks of a model.

        Raises:
            ConfigError: the model cannot be made; the user's code has ended the process.
        """
        found = self._asked(preflight.blocks_of, deadline_s, deadline_s, model)
        if isinstance(found, ConfigError | StrategyError):
            raise found
        return found

    def view(self, experiment: Experiment, what: str) -> str:
        """Return what a strategy has to show.

        Raises:
            ConfigError: none of them has such a view; the user's code has ended the process.
            StrategyError: the strategy does not suit the model.
        """
        found = self._asked(view, experiment.protocol.deadline_s, experiment, what)
        if isinstance(found, ConfigError):
            raise found
        return found

    def _asked(self, function: Callable[..., T], deadline_s: float, *arguments: Any) -> T | ConfigError:
        of_user = preflight.users_code(arguments)
        if of_user is None:
            if self.is_for_users_code:
                return function(*arguments)
            found: T = self.call(_name(function), *arguments)
            return found
        option, words = of_user
        try:
            found = self.call(_name(function), *arguments, deadline_s=deadline_s + _SLACK_S)
        except LateAnswerError:
            return ConfigError(option, f"{words} did not return within {deadline_s:g} s")
        except AssistantEndedError as error:
            problem = f"the process that ran {words} {error.ending}"
            return ConfigError(option, f"{problem}; a factory returns or raises")
        return found


def refusal(*arguments: Any) -> preflight.Refusal:
    """Return what `preflight.built_refusal` returns, and write meanwhile what strategies log to stderr."""
    with planning_shown():
        return preflight.built_refusal(*arguments)


def view(experiment: Experiment, what: str) -> str:
    """Return what a strategy has to show, and write meanwhile what strategies log to stderr."""
    with planning_shown():
        return views.view_of(experiment, what)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"
