"""Compiled steps on tensors without data: the compiler really compiles, and what it made really runs.

Dynamo and AOTAutograd trace with fake tensors anyway, so they do with these what they do with those of a
trial: graphs, their partition, and the order of operators are the same. `aot_eager` runs its graphs operator
by operator, and so it does here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import convert_frame

from harness.experiment.experiment import Experiment
from harness.trial import compilation
from harness.trial.compilation import compiling
from strategies.estimate.patched import (
    LeavesCompiled,
    Wrappings,
    outside_of_function_modes,
    outside_of_modes,
    wrapped,
)
from strategies.tracing.balanced_routing import BalancedFakes


class CompiledFakes(LeavesCompiled, BalancedFakes):
    """Fake tensors that a compiler is given as it is given others."""


def fakes_of(experiment: Experiment) -> BalancedFakes:
    """Return the mode in which a step of `experiment` runs."""
    return CompiledFakes() if experiment.is_compiled else BalancedFakes()


@contextmanager
def compiling_fakes(experiment: Experiment) -> Iterator[None]:
    """Let models of `experiment` be compiled inside the scope, as in a trial."""
    with (
        compiling(experiment),
        wrapped(compilation.Entrance, "__call__", _without_function_modes),
        wrapped(convert_frame, "_compile", outside_of_modes),  # else Dynamo's fake tensors get into ours
        wrapped(Wrappings, "lifted", _lifted),
    ):
        yield


def _without_function_modes(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function outside of modes that a trial has not; Dynamo would trace them."""
    with outside_of_function_modes():
        return original(*args, **kwargs)


@contextmanager
def _lifted(original: Callable[..., Any], /, wrappings: Wrappings) -> Iterator[None]:
    """Lift what a measurement has wrapped, and the modes that a trial has not."""
    with outside_of_function_modes(), original(wrappings):
        yield
