"""Fields of an experiment that decide whether a model can be trained at all."""

from __future__ import annotations

from dataclasses import dataclass

from harness.experiment.experiment import Experiment


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Fields of experiment and mesh that decide whether a model can be trained.

    Fields:
        fsdp: `None` where nothing is sharded.
    """

    dtype: str
    optimizer: str
    fsdp: str | None
    use_orig_params: bool

    @classmethod
    def of(cls, experiment: Experiment) -> Training:
        """Return the part of `experiment` that decides."""
        mesh = experiment.mesh
        return cls(
            dtype=experiment.dtype,
            optimizer=experiment.optimizer,
            fsdp=mesh.fsdp if mesh.is_sharded else None,
            use_orig_params=mesh.use_orig_params,
        )
