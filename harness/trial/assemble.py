"""Assembly of one model, in one visible order: build, shard, chunk, compile, AC, distribute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.experiment.experiment import Experiment, name_of
from harness.measure.trainee import Watcher, forward_and_backward
from harness.measure.work.compiled_graphs import CompiledGraphs
from harness.models.base import Batch, LossFunction
from harness.records.measured import TrainedModel
from harness.trial import checkpoint_errors, forward_errors
from harness.trial.build import Build
from harness.trial.compilation import alike, compile_model
from harness.trial.optimizers import optimizer_of
from harness.trial.parallel import distribute, loss_context, split_tensors, unreduced
from harness.trial.plain_model import PlainModel
from harness.trial.planned_step import planned_step
from strategies import CallSite, LossInputs, Observation
from strategies.regions.blocks import find_blocks, submodule
from strategies.regions.region import regions
from strategies.shard.model.shard_plan import ShardPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """A model ready to train under one experiment.

    Fields:
        model: the outermost module.
        call: callable of a training step: `model`, or a region around it (`wrap_order=call_site`).
        observe: returns the observation of the latest step, with the plans of all strategies.
        blocks: modules that reports name, by their FQN in the plain model.
        checkpointed: modules that AC recomputes; the blocks where it names none.
        optimizer: optimizer of the parameters.
        loss: function of outputs and a batch, which was made with the model.
        has_loss: whether `call` gives the loss where its last input is `LossInputs`: a plan includes it, and
            outputs are never whole.
        autocast: makes the context in which the model and the loss run.
        context: makes that in which forward, loss and backward run.
        drops_gradients: whether `zero_grad` sets gradients to `None` instead of zero.
        trained: what the record says of the model before any strategy.
        compiled: what the compiler made of the model; `None` where nothing is compiled.
        between: makes the scope of all micro-batches of a step but the last.
    """

    model: nn.Module
    call: Callable[..., Any]
    observe: Callable[[], Observation]
    blocks: Mapping[str, nn.Module]
    checkpointed: Mapping[str, nn.Module]
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    has_loss: bool
    autocast: Callable[[], AbstractContextManager[Any]]
    context: Callable[[], AbstractContextManager[Any]]
    drops_gradients: bool
    trained: TrainedModel
    compiled: CompiledGraphs | None = None
    between: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return the model's outputs, `None` where it has the loss, and the scalar loss.

        Raises:
            ConfigError: dtypes of inputs and parameters, or parameters without gradients, do not suit.
        """
        try:
            return self._forward(batch)
        except RuntimeError as error:
            told = forward_errors.explained(error, self.model, batch)
            if told is None:
                raise
            raise told from error

    def _forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return outputs and loss under autocast; a model that has its loss gives no outputs."""
        with self.autocast(), self.context():
            if self.has_loss:
                inputs = *batch.inputs, LossInputs((batch.targets,))
                return None, self.call(*inputs, **batch.keywords)
            outputs = self.call(*batch.inputs, **batch.keywords)
            loss = self.loss(outputs, batch)
            # of logits in parts every rank has the whole loss
            return outputs, loss.to_local() if isinstance(loss, DTensor) else loss

    def step(self, batch: Batch, watcher: Watcher) -> None:
        """Accumulate the gradients of a batch, one micro-batch after the other.

        Raises:
            ConfigError, RuntimeError: as of `forward` and `backward`.
        """
        *others, last = batch.parts()
        for part in others:
            with self.between():
                forward_and_backward(self, part, watcher, microbatches=len(others) + 1)
        forward_and_backward(self, last, watcher, microbatches=len(others) + 1)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients.

        Raises:
            RuntimeError: a recomputation does not repeat forward; the message names block and operator.
        """
        with self.context():
            checkpoint_errors.backward(loss, self.model)

    def update(self) -> None:
        """Take one optimizer step."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=self.drops_gradients)


def assemble(
    experiment: Experiment,
    device: torch.device,
    devices: DeviceMesh | None,
    sample: Batch,
    *,
    build: Build | None = None,
    is_dense: bool = False,
    inductor: Sequence[str] = (),
) -> Assembled:
    """Build the model of `experiment` on `device` and put everything on it, in this order.

    Every rank builds the whole model from the seed before it is sharded, so parameters are the same
    on every mesh and for every module a user may bring, with its own initialisation.

    Args:
        experiment: the description.
        device: device of this rank.
        devices: the device mesh; `None` for one rank.
        sample: a batch of this rank, or a micro-batch of it: what the model is called with.
        build: what the models of the trial share; `None`: decided here, for this model alone.
        is_dense: each rank of `tp` computes the whole model.
        inductor: options of Inductor that are set while the model is compiled.

    Raises:
        StrategyError: a strategy does not fit the model.
    """
    mesh, ac, inputs = experiment.mesh, experiment.ac, sample.inputs
    build = build or Build.of(experiment, inputs, device)
    backend = build.backends.of(experiment, inductor=inductor)
    plain = PlainModel.of(experiment, device)
    model, units = plain.model, plain.units
    # a variant may name its blocks by class; reports then name these
    classes: tuple[str, ...] = getattr(ac, "module_classes", ())
    blocks = find_blocks(model, layers_fqn="", module_classes=classes) if classes else units
    trained = plain.as_trained(experiment)

    # shard
    if not is_dense:
        model = split_tensors(model, experiment, devices, build.sharding)

    # chunk, as is planned for the step that the trial takes, or was for a model like this one
    step = planned_step(experiment, plain, sample, device)
    key = f"{alike(experiment)}, dense" if is_dense else alike(experiment)
    model = experiment.chunk.for_step(step, build.chunks, key).apply(model, inputs)
    has_loss = experiment.chunk.has_loss(model)

    # compile and AC: regions around compiled blocks, or blocks compiled with their regions
    is_compiled_first = experiment.compile_order == "compile_first" and name_of(ac) != "none"
    if experiment.is_compiled and is_compiled_first:
        compile_model(model, units, experiment, backend)
    if experiment.wrap_order == "inside_fsdp":
        model = ac.apply(model, inputs)
    if experiment.is_compiled and not is_compiled_first:
        compile_model(model, units, experiment, backend)

    # distribute, and AC where it stands around what is distributed
    model = distribute(model, units, experiment, devices)
    if experiment.wrap_order == "outside_fsdp":
        model = ac.apply(model, inputs)
    site = ac.call_site(model) if experiment.wrap_order == "call_site" else None

    # AC recomputes the modules with regions; without any, or with one around all, reports name the blocks
    chosen = getattr(ac, "labels", None) or regions(model)
    is_of_blocks = not chosen or "" in chosen
    return Assembled(
        model=model,
        call=model if site is None else site,
        observe=partial(_observe, experiment, model, site, build.sharding if experiment.is_sharded else None),
        blocks=blocks,
        checkpointed=blocks if is_of_blocks else {fqn: submodule(model, fqn) for fqn in chosen},
        optimizer=optimizer_of(experiment, model),
        loss=plain.loss,
        has_loss=has_loss,
        autocast=plain.precision.autocast,
        context=nullcontext if is_dense else loss_context(mesh),
        # with original parameters on the host, FSDP1 adds to the gradients of the step before where they were
        # dropped, and says nothing (measured: gradient norms 0.368 for 0.133 in the second step)
        drops_gradients=not (mesh.fsdp == "fsdp1" and mesh.cpu_offload and mesh.use_orig_params),
        trained=trained,
        compiled=backend.graphs if experiment.is_compiled else None,
        between=partial(unreduced, model) if mesh.sync == "last" else nullcontext,
    )


def _observe(
    experiment: Experiment, model: nn.Module, site: CallSite | None, sharding: ShardPlan | None
) -> Observation:
    """Return what AC and chunking observed in the latest step, with the plans of all strategies."""
    of_ac = experiment.ac.observe(model) if site is None else site.observe()
    of_chunk = experiment.chunk.observe(model)
    plans = {**(of_chunk.plan or {}), **(of_ac.plan or {})}  # a plan of both is that of AC
    if sharding is not None:
        plans["sharding"] = sharding.as_json()
    return replace(
        of_ac, chunks=of_chunk.chunks, plan=plans or None, unneeded=of_ac.unneeded or of_chunk.unneeded
    )
