"""What can be refused before any process starts, on a model that holds no memory."""

from __future__ import annotations

import os

import torch

from harness.errors import ConfigError
from harness.experiment import Experiment
from harness.mesh import Mesh
from harness.models.parts.containers import require_container

RANKS_PER_CORE = 8


def check(experiment: Experiment) -> None:
    """Refuse what cannot run here.

    The model is built on the meta device and the variant applied to it, so that a missing FQN or an
    operator that does not exist is found without a rank, a byte or a second of compute.

    Raises:
        ConfigError: the mesh does not fit this machine, the model or the data.
        StrategyError: the variant does not fit the model.
    """
    _check_ranks(experiment)
    tokens = experiment.sequence_length
    experiment.model.check(sequence_length=tokens, tp=experiment.mesh.tp)
    if experiment.model.fixed_batch() is None:
        experiment.data.check(vocab_size=experiment.model.vocab_size, sequence_length=tokens)
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
