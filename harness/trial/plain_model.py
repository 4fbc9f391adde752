"""The plain model of an experiment: before it is sharded, chunked, recomputed or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from harness.experiment.experiment import Experiment
from harness.models.base import LossFunction
from harness.models.parts import made_model
from harness.records.measured import AROUND, TrainedModel
from harness.trial.precision import Precision
from harness.trial.without_dropout import STILL
from strategies import generators
from strategies.estimate.tensors import dtype_name
from strategies.regions import block_search
from strategies.regions.blocks import children_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainModel:
    """A plain model in the precision of its experiment.

    Fields:
        loss: function of its outputs and a batch.
        precision: what it keeps and computes in.
        units: its blocks, which FSDP makes its units and a compiler compiles, by FQN.
        changed: number of tensors that were cast, by what happened to them.
    """

    model: nn.Module
    loss: LossFunction
    precision: Precision
    units: Mapping[str, nn.Module]
    changed: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, experiment: Experiment, device: torch.device) -> PlainModel:
        """Return the plain model as the experiment's seed initialises it.

        Raises:
            ConfigError: something cannot be cast without loss.
        """
        # a user's module may draw its weights from any of these
        generators.seed(experiment.seed)
        # a mode is asked at each call that initialises a parameter
        with nullcontext() if device == torch.get_default_device() else torch.device(device):
            model, loss = experiment.model.make()
        return cls.cast(experiment, model.to(device=device), loss, device)

    @classmethod
    def cast(
        cls, experiment: Experiment, model: nn.Module, loss: LossFunction, device: torch.device
    ) -> PlainModel:
        """Return a model that was made, cast in place to the precision that it has on `device`.

        Raises:
            ConfigError: something cannot be cast without loss.
        """
        precision, layers_fqn = Precision.of(experiment, device), experiment.model.layers_fqn
        return cls(
            model=model,
            loss=loss,
            precision=precision,
            changed=precision.cast(model),
            units=children_of(model, layers_fqn) if layers_fqn else {},
        )

    def as_trained(self, experiment: Experiment) -> TrainedModel:
        """Return what the record says of the model, and of what stands in for the user's code."""
        spec = experiment.model
        mesh = experiment.mesh
        inputs = "tokens" if spec.reads_tokens() else "samples"
        if spec.fixed_batch(device="meta") is not None:
            inputs = "example rows" if spec.splits_fixed_batch() else "example"
        is_still = mesh.tp * mesh.pp > 1 and spec.may_drop_out()
        return TrainedModel(
            elements=made_model.elements_by_dtype(self.model),
            computes_in=dtype_name(self.precision.computes_in(self.model)),
            changed=dict(self.changed),
            inputs=inputs,
            remarks=(*spec.remarks(ep=mesh.ep, tp=mesh.tp), *self._questions(experiment)),
            replaced=(*spec.replaced(mesh.ep), *([STILL] if is_still else [])),
        )

    def _questions(self, experiment: Experiment) -> tuple[str, ...]:
        """Return what is to be asked about the blocks that AC is given."""
        ac = experiment.ac
        layers_fqn: str = getattr(ac, "layers_fqn", "")
        if getattr(ac, "module_classes", ()) or not layers_fqn:
            return ()
        is_units = layers_fqn == experiment.model.layers_fqn
        chosen = self.units if is_units else children_of(self.model, layers_fqn)
        asked = block_search.question(self.model, chosen)
        return () if asked is None else (f"{AROUND} {asked}",)
