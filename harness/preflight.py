"""What can be refused before any process starts, on a model that holds no memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch

from harness.data import Text
from harness.errors import ConfigError
from harness.experiment import Experiment, Recipe
from harness.mesh import Mesh
from harness.models.parts.containers import require_container
from harness.models.python import PythonSpec

RANKS_PER_CORE = 8


def check(experiment: Experiment) -> None:
    """Refuse what cannot run here.

    The model is built on the meta device and the variant applied to it, so that a missing FQN or an
    operator that does not exist is found without a rank, a byte or a second of compute. A user's factory
    runs here, for no longer than the trial may take.

    Raises:
        ConfigError: the mesh does not fit this machine, the model or the data; an option has no effect; the
            user's factory fails or does not return.
        StrategyError: the variant does not fit the model.
    """
    _check_ranks(experiment)
    _check_call_site(experiment)
    with _deadline(experiment):
        _check_model(experiment)


def _check_model(experiment: Experiment) -> None:
    tokens = experiment.sequence_length
    experiment.model.check(sequence_length=tokens, tp=experiment.mesh.tp)
    if experiment.model.fixed_batch() is None:
        experiment.data.check(vocab_size=experiment.model.vocab_size, sequence_length=tokens)
    else:
        _check_fixed_batch(experiment)
    experiment.model.files()  # runs the user's factory once more, and never again in this process
    with torch.device("meta"):
        model = experiment.model.build()
    require_container(model, experiment.model.layers_fqn)
    if experiment.wrap_order == "call_site":
        experiment.ac.call_site(model)
    else:
        experiment.ac.apply(model)


def device_type(mesh: Mesh) -> str:
    """Return `cuda` or `cpu`: what `mesh.device` means on this machine."""
    if mesh.device != "auto":
        return mesh.device
    return "cuda" if torch.cuda.is_available() else "cpu"


class _LateError(BaseException):
    """The alarm; no `except Exception` of the user's code takes it for its own."""


@contextmanager
def _deadline(experiment: Experiment) -> Iterator[None]:
    """Refuse a factory of the user's that does not return; only the main thread can have an alarm."""
    model, seconds = experiment.model, experiment.protocol.deadline_s
    if not isinstance(model, PythonSpec) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _LateError

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _LateError as error:
        problem = f"{model.factory!r} did not return within {seconds:g} s"
        raise ConfigError("model.factory", problem) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _check_fixed_batch(experiment: Experiment) -> None:
    """Refuse what says how a batch is drawn where the model's own factory brings it."""
    usual = Recipe()
    asked: dict[str, tuple[object, object]] = {
        "sequence_length": (experiment.sequence_length, usual.sequence_length)
    }
    if usual.batch_size % experiment.mesh.dp == 0:  # else the mesh asks for another one
        asked["batch_size"] = experiment.batch_size, usual.batch_size
    for option, (value, default) in asked.items():
        if value != default:
            raise ConfigError(
                option, f"has no effect, the factory brings its own inputs; leave it at {default}"
            )
    if experiment.data != Text():
        raise ConfigError(
            "data", "has no effect, the factory brings its own inputs; leave it at text, without a path"
        )


def _check_call_site(experiment: Experiment) -> None:
    """Refuse a choice of blocks where the model as a whole is the region."""
    if experiment.wrap_order != "call_site":
        return
    usual = {"module_classes": (), "layers_fqn": experiment.model.layers_fqn}
    for option, default in usual.items():
        if getattr(experiment.ac, option, default) != default:
            raise ConfigError(f"ac.{option}", "has no effect: call_site makes the whole model one region")


def _check_ranks(experiment: Experiment) -> None:
    mesh = experiment.mesh
    if mesh.nodes > 1:
        raise ConfigError("mesh.nodes", f"this launcher runs on one node, got {mesh.nodes}")
    if device_type(mesh) == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "mesh.device", "cuda was asked for, but this torch sees no CUDA device; use cpu"
            )
        devices = torch.cuda.device_count()
        if mesh.ranks_per_node > devices:
            raise ConfigError(
                "mesh", f"{mesh.label} needs {mesh.ranks_per_node} CUDA devices a node, found {devices}"
            )
        return
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0))
    if mesh.ranks_per_node > most:
        raise ConfigError(
            "mesh",
            f"{mesh.label} needs {mesh.ranks_per_node} ranks on this node, at most {most} fit its cores "
            f"({RANKS_PER_CORE} a core); use a smaller mesh",
        )
