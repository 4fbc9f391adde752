"""Assembly of one model, in one visible order: build, shard, cut, chunk, compile, AC, distribute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment, name_of
from harness.measure.trainee import Watcher, forward_and_backward
from harness.measure.work.compiled_graphs import CompiledGraphs
from harness.models.base import Batch, LossFunction
from harness.records.measured import TrainedModel
from harness.trial import checkpoint_errors, forward_errors
from harness.trial.build import Build
from harness.trial.compilation import Backend, alike, compile_model
from harness.trial.parallel import (
    distribute,
    split_context,
    split_experts,
    split_tensors,
    step_context,
    unreduced,
    whole_loss,
)
from harness.trial.pipeline import Pipeline
from harness.trial.plain_model import PlainModel
from harness.trial.planned_step import planned_step
from harness.trial.stages import Cut, Stage, Stages
from strategies import CallSite, LossInputs, Observation, PlannedStep, Strategy
from strategies.regions.blocks import find_blocks, submodule
from strategies.regions.region import regions
from strategies.shard.model.shard_plan import ShardPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """A model ready to train under one experiment.

    Fields:
        call: callable of a training step: `model`, or a region around it (`wrap_order=call_site`).
        observe: returns the observation of the latest step, with the plans of all strategies.
        blocks: modules that reports name, by their FQN in the plain model.
        checkpointed: modules that AC recomputes; the blocks where it names none.
        loss: function of outputs and a batch, which was made with the model.
        has_loss: whether `call` gives the loss where its last input is `LossInputs`: a plan includes it, and
            outputs are never whole.
        autocast: makes the context in which the model and the loss run.
        context: makes that in which forward, loss and backward run.
        drops_gradients: whether `zero_grad` sets gradients to `None` instead of zero.
        trained: what the record says of the model before any strategy.
        compiled: what the compiler made of the model; `None` where nothing is compiled.
        between: makes the scope of all micro-batches of a step but the last.
        pipeline: runs the stages of this rank, which `model` holds; `None` where the model is whole.
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
    is_variant: bool = False
    compiled: CompiledGraphs | None = None
    between: Callable[[], AbstractContextManager[Any]] = nullcontext
    pipeline: Pipeline | None = None

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
            return outputs, self.loss(outputs, batch)

    def step(self, batch: Batch, watcher: Watcher) -> None:
        """Accumulate the gradients of a batch, one micro-batch after the other or as a schedule orders them.

        Raises:
            ConfigError, RuntimeError: as of `forward` and `backward`.
        """
        *others, last = batch.parts()
        if self.pipeline is not None:
            with self.context():
                self.pipeline.step([*others, last], self.loss, watcher, self.autocast)
            return
        for part in others:
            with self.between():
                forward_and_backward(self, part, watcher, microbatches=len(others) + 1)
        forward_and_backward(self, last, watcher, microbatches=len(others) + 1)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients; of a variant whose loss depends on nothing to train, none.

        The twin has gradients then, and the comparison says which are missing.

        Raises:
            ConfigError: the plain model has nothing to train.
            RuntimeError: a recomputation does not repeat forward; the message names block and operator.
        """
        if not loss.requires_grad:
            if self.is_variant:
                return
            raise ConfigError("model", "the loss depends on no parameter that requires a gradient")
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
        devices: the device mesh; `None` for one rank.
        sample: a batch of this rank, or a micro-batch of it: what the model is called with.
        build: what the models of the trial share; `None`: decided here, for this model alone.
        is_dense: each rank of `tp`, `cp` and `ep` computes the whole model, on whole sequences.
        inductor: options of Inductor that are set while the model is compiled.

    Raises:
        StrategyError: a strategy does not fit the model.
    """
    split = experiment
    if is_dense:
        experiment = experiment.dense()
    mesh = experiment.mesh
    build = build or Build.of(experiment, sample.inputs, device)
    backend = build.backends.of(experiment, inductor=inductor)
    plain = PlainModel.of(experiment, device)
    trained = plain.as_trained(experiment)
    cut = _cut(experiment, plain, sample, build) if mesh.pp > 1 and not is_dense else None
    passed_on = None if cut is None else cut.between(plain, device, parts=mesh.tp if mesh.sp else 1)

    # shard
    model = plain.model
    if not is_dense:
        model = split_tensors(model, experiment, devices, build.sharding)
        model = split_context(model, experiment, devices)
    model = split_experts(model, split, devices, build.routing, is_dense=is_dense)

    # cut, and from here on everything is done to each stage, with fewer blocks under their old names
    stages = [Stage(index=0, model=model, units=plain.units)]
    if cut is not None:
        assert devices is not None, "a pipeline has several ranks"
        stages = cut.rank(replace(plain, model=model), mesh, devices.get_local_rank("pp"))
    key = alike(replace(experiment, seed=0))  # no plan follows from weights
    key = f"{key}, dense" if is_dense else key
    made = [
        _made(
            experiment.at_stage(stage.index),
            replace(plain, model=stage.model, units=stage.units),
            sample if passed_on is None or not stage.index else replace(sample, inputs=(passed_on,)),
            devices=devices,
            backend=backend,
            chunks=partial(experiment.chunk.for_step, plans=build.chunks, key=key),
            device=device,
        )
        for stage in stages
    ]

    model = made[0].model if len(made) == 1 else Stages([each.model for each in made])
    pipeline = None
    if passed_on is not None and devices is not None:
        pipeline = Pipeline(
            {stage.index: each.model for stage, each in zip(stages, made, strict=True)},
            mesh=mesh,
            group=devices["pp"].get_group(),
            device=device,
            microbatches=experiment.microbatches,
            sample=sample,
            between=passed_on,
            on_microbatch=partial(setattr, build.routing, "microbatch"),
        )
    site = made[0].site
    return Assembled(
        model=model,
        call=model if site is None else site,
        observe=partial(_observe, experiment, made, build.sharding if experiment.is_sharded else None),
        blocks={fqn: block for each in made for fqn, block in each.blocks.items()},
        checkpointed={fqn: block for each in made for fqn, block in each.checkpointed.items()},
        optimizer=_optimizer_of(experiment, model),
        loss=whole_loss(plain.loss) if mesh.loss_parallel and not is_dense else plain.loss,
        has_loss=made[0].has_loss,
        autocast=plain.precision.autocast,
        context=nullcontext if is_dense else partial(step_context, mesh),
        # with original parameters on the host, FSDP1 adds to the gradients of the step before where they were
        # dropped, and says nothing (measured: gradient norms 0.368 for 0.133 in the second step)
        drops_gradients=not (mesh.fsdp == "fsdp1" and mesh.cpu_offload and mesh.use_orig_params),
        trained=trained,
        is_variant=experiment != experiment.twin(),
        compiled=backend.graphs if experiment.is_compiled else None,
        between=partial(unreduced, model) if mesh.sync == "last" else nullcontext,
        pipeline=pipeline,
    )


def _optimizer_of(experiment: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    # the fused list kernels refuse a mixture of plain and DTensor parameters, which tensor parallelism makes,
    # and one of DTensors on several meshes, as experts are
    foreach = False if experiment.mesh.tp * experiment.mesh.ep > 1 else None
    kind = torch.optim.SGD if experiment.optimizer == "sgd" else torch.optim.AdamW
    return kind(model.parameters(), lr=experiment.learning_rate, foreach=foreach)


def _cut(experiment: Experiment, plain: PlainModel, sample: Batch, build: Build) -> Cut:
    """Return how the model is cut, which the first model of a trial in this dtype shows."""
    if experiment.dtype not in build.cuts:
        build.cuts[experiment.dtype] = Cut.of(experiment.model, plain, experiment.mesh, sample)
    return build.cuts[experiment.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """A model, or a stage of one, with everything on it.

    Fields:
        site: a region around the call of the model, where there is one.
        blocks, checkpointed, has_loss: as of `Assembled`.
    """

    model: nn.Module
    ac: Strategy
    site: CallSite | None
    blocks: Mapping[str, nn.Module]
    checkpointed: Mapping[str, nn.Module]
    has_loss: bool


def _made(
    experiment: Experiment,
    plain: PlainModel,
    sample: Batch,
    *,
    devices: DeviceMesh | None,
    backend: Backend,
    chunks: Callable[[PlannedStep], Strategy],
    device: torch.device,
) -> _Made:
    """Chunk, compile, recompute and distribute a model, or a stage of one, in place.

    Args:
        sample: a micro-batch as it takes it.
        devices: the device mesh; `None` for one rank.
    """
    model, units, ac, inputs = plain.model, plain.units, experiment.ac, sample.inputs
    # a variant may name its blocks by class; reports then name these
    classes: tuple[str, ...] = getattr(ac, "module_classes", ())
    blocks = find_blocks(model, layers_fqn="", module_classes=classes) if classes else units

    # chunk, as is planned for the step that the trial takes, or was for a model like this one
    model = chunks(planned_step(experiment, plain, sample, device)).apply(model, inputs)
    has_loss = experiment.chunk.has_loss(model)

    # compile and AC: regions around compiled blocks, or blocks compiled with their regions
    is_compiled_first = experiment.compile_order == "compile_first" and name_of(ac) != "none"
    if experiment.is_compiled and is_compiled_first:
        compile_model(model, units, experiment, backend)
    if experiment.wrap_order == "inside_fsdp":
        model = ac.apply(model, inputs)
    if experiment.is_compiled and not is_compiled_first:
        compile_model(model, blocks if experiment.plans_graphs else units, experiment, backend)

    # distribute, and AC where it stands around what is distributed
    model = distribute(model, units, experiment, devices)
    if experiment.wrap_order == "outside_fsdp":
        model = ac.apply(model, inputs)

    # AC recomputes the modules with regions; without any, or with one around all, reports name the blocks
    chosen = getattr(ac, "labels", None) or regions(model)
    is_of_blocks = not chosen or "" in chosen
    return _Made(
        model=model,
        ac=ac,
        site=ac.call_site(model) if experiment.wrap_order == "call_site" else None,
        blocks=blocks,
        checkpointed=blocks if is_of_blocks else {fqn: submodule(model, fqn) for fqn in chosen},
        has_loss=has_loss,
    )


def _observe(experiment: Experiment, made: Sequence[_Made], sharding: ShardPlan | None) -> Observation:
    """Return what AC and chunking observed in the latest step, with the plans of all strategies."""
    first, *others = (_observe_one(experiment, each) for each in made)
    for other in others:
        first = first.joined(other)
    if sharding is None:
        return first
    return replace(first, plan={**(first.plan or {}), "sharding": sharding.as_json()})


def _observe_one(experiment: Experiment, made: _Made) -> Observation:
    of_ac = made.ac.observe(made.model) if made.site is None else made.site.observe()
    of_chunk = experiment.chunk.observe(made.model)
    plans = {**(of_chunk.plan or {}), **(of_ac.plan or {})}  # a plan of both is that of AC
    return replace(
        of_ac, chunks=of_chunk.chunks, plan=plans or None, unneeded=of_ac.unneeded or of_chunk.unneeded
    )
