"""Assembly of one model, in one visible order: build, shard, chunk, AC, compile, FSDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.experiment.experiment import Experiment
from harness.measure.work.compiled_graphs import CompiledGraphs
from harness.models.base import Batch, LossFunction
from harness.models.parts import made_model
from harness.records.measured import AROUND, TrainedModel
from harness.trial import checkpoint_errors, forward_errors
from harness.trial.compilation import Backend, Backends, alike, compile_model
from harness.trial.parallel import parallelise_tensors, replicate, shard_fsdp1, shard_fsdp2
from harness.trial.plan_sharding import plan_sharding
from harness.trial.planned_step import build, planned_step
from harness.trial.precision import autocast, compute_dtype
from harness.trial.without_dropout import STILL
from strategies import CallSite, JoinsLoss, LossInputs, Observation, PlansForStep, call_site_of
from strategies.regions import block_search
from strategies.regions.blocks import children_of, find_blocks, submodule
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
        drops_gradients: whether `zero_grad` sets gradients to `None` instead of zero.
        trained: what the record says of the model before any strategy.
        compiled: what the compiler made of the model; `None` where nothing is compiled.
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
    drops_gradients: bool
    trained: TrainedModel
    compiled: CompiledGraphs | None = None

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
        with self.autocast():
            if self.has_loss:
                inputs = *batch.inputs, LossInputs((batch.targets,))
                return None, self.call(*inputs, **batch.keywords)
            outputs = self.call(*batch.inputs, **batch.keywords)
            return outputs, self.loss(outputs, batch)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients.

        Raises:
            RuntimeError: a recomputation does not repeat forward; the message names block and operator.
        """
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
    sharding: ShardPlan | None = None,
    is_dense: bool = False,
    backend: Backend | None = None,
    plans: MutableMapping[str, Any] | None = None,
) -> Assembled:
    """Build the model of `experiment` on `device` and put everything on it, in this order.

    Every rank builds the whole model from the seed before it is sharded, so parameters are the same
    on every mesh and for every module a user may bring, with its own initialisation.

    Args:
        experiment: the description.
        device: device of this rank.
        devices: the device mesh; `None` for one rank.
        sample: a batch of this rank.
        sharding: plan of the sharding variant; `None`: made here.
        is_dense: each rank of `tp` computes the whole model.
        backend: compiles the model, where the experiment asks for it; `None`: a fresh one.
        plans: plans of chunks that earlier models of this rank have; models that are alike share one.

    Raises:
        StrategyError: a strategy does not fit the model.
    """
    mesh = experiment.mesh
    if not experiment.is_sharded:
        sharding = None
    elif sharding is None:
        sharding = plan_sharding(experiment, sample.inputs, device)
    backend = backend or Backends().of(experiment)
    model, loss, changed = build(experiment, device)
    units = children_of(model, experiment.model.layers_fqn) if experiment.model.layers_fqn else {}
    blocks = _reported(model, units, experiment)
    trained = _trained(experiment, model, changed, _questions(experiment, model))

    model = model if is_dense else _shard(model, experiment, devices, sharding)
    model = _chunk(model, loss, experiment, device, sample, is_dense=is_dense, plans=plans)
    has_loss = isinstance(experiment.chunk, JoinsLoss) and experiment.chunk.has_loss(model)
    model = compile_model(model, units, experiment, backend, "compile_first")
    model = _checkpoint(model, experiment, sample, "inside_fsdp")
    model = compile_model(model, units, experiment, backend, "ac_first")
    model = _distribute(model, units, experiment, devices)
    model = _checkpoint(model, experiment, sample, "outside_fsdp")
    site = call_site_of(experiment.ac, model) if experiment.wrap_order == "call_site" else None

    return Assembled(
        model=model,
        call=model if site is None else site,
        observe=partial(_observe, experiment, model, site, sharding),
        blocks=blocks,
        checkpointed=_checkpointed(model, blocks, experiment),
        optimizer=_optimizer(model, experiment),
        loss=loss,
        has_loss=has_loss,
        autocast=autocast(experiment, device),
        # with original parameters on the host, FSDP1 adds to the gradients of the step before where they were
        # dropped, and says nothing (measured: gradient norms 0.368 for 0.133 in the second step)
        drops_gradients=not (mesh.fsdp == "fsdp1" and mesh.cpu_offload and mesh.use_orig_params),
        trained=trained,
        compiled=backend.graphs if experiment.is_compiled else None,
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


def _questions(experiment: Experiment, model: nn.Module) -> tuple[str, ...]:
    """Return what is to be asked about the blocks that AC is given."""
    ac = experiment.ac
    if getattr(ac, "module_classes", ()) or not getattr(ac, "layers_fqn", ""):
        return ()
    asked = block_search.question(model, children_of(model, ac.layers_fqn))  # type: ignore[attr-defined]
    return () if asked is None else (f"{AROUND} {asked}",)


def _trained(
    experiment: Experiment, model: nn.Module, changed: dict[str, int], questions: tuple[str, ...]
) -> TrainedModel:
    """Return what is trained, and on which inputs."""
    spec = experiment.model
    inputs = "tokens" if spec.reads_tokens() else "samples"
    if spec.fixed_batch(device="meta") is not None:
        inputs = "example rows" if spec.splits_fixed_batch() else "example"
    return TrainedModel(
        elements=made_model.elements_by_dtype(model),
        computes_in=made_model.dtype_name(compute_dtype(experiment, model)),
        changed=changed,
        inputs=inputs,
        remarks=(*spec.remarks(), *questions),
        replaced=_replaced(experiment),
    )


def _replaced(experiment: Experiment) -> tuple[str, ...]:
    """Return what stands in for what the user's code decides, in this trial or in its proof."""
    spec = experiment.model
    is_still = experiment.mesh.tp > 1 and spec.may_drop_out()
    return *spec.replaced(), *([STILL] if is_still else [])


def _reported(
    model: nn.Module, units: Mapping[str, nn.Module], experiment: Experiment
) -> Mapping[str, nn.Module]:
    """Return the modules that the variant names by class, or else the blocks of the model."""
    classes: tuple[str, ...] = getattr(experiment.ac, "module_classes", ())
    return find_blocks(model, layers_fqn="", module_classes=classes) if classes else units


def _checkpointed(
    model: nn.Module, blocks: Mapping[str, nn.Module], experiment: Experiment
) -> Mapping[str, nn.Module]:
    """Return the modules that AC recomputes; the blocks where it has no regions, or one of all."""
    labels: Mapping[str, Any] = getattr(experiment.ac, "labels", None) or {}
    chosen = labels or regions(model)
    return blocks if "" in chosen or not chosen else {fqn: submodule(model, fqn) for fqn in chosen}


def _shard(
    model: nn.Module, experiment: Experiment, devices: DeviceMesh | None, sharding: ShardPlan | None
) -> nn.Module:
    """Return the model as its variant shards it over the ranks of `tp`, or as its own plan does."""
    if devices is None or experiment.mesh.tp == 1:
        return model
    if sharding is not None:
        return experiment.shard.realise(model, sharding, devices["tp"])
    return parallelise_tensors(model, experiment.model.tensor_parallel_plan(), devices["tp"])


def _chunk(
    model: nn.Module,
    loss: LossFunction,
    experiment: Experiment,
    device: torch.device,
    sample: Batch,
    *,
    is_dense: bool,
    plans: MutableMapping[str, Any] | None,
) -> nn.Module:
    """Return the model with its chunks, planned for the step that the trial takes, or as one like it is."""
    chunk = experiment.chunk
    if isinstance(chunk, PlansForStep):
        key = f"{alike(experiment)}, dense" if is_dense else alike(experiment)
        chunk = chunk.for_step(planned_step(experiment, model, loss, sample, device), plans, key)
    return chunk.apply(model, sample.inputs)


def _checkpoint(model: nn.Module, experiment: Experiment, sample: Batch, place: str) -> nn.Module:
    """Return the model with AC on it, where `place` is the experiment's."""
    return experiment.ac.apply(model, sample.inputs) if experiment.wrap_order == place else model


def _distribute(
    model: nn.Module, units: Mapping[str, nn.Module], experiment: Experiment, devices: DeviceMesh | None
) -> nn.Module:
    """Return the model as the data-parallel ranks of the mesh hold it."""
    mesh = experiment.mesh
    if devices is None or mesh.dp == 1:
        return model
    if not mesh.is_sharded:
        return replicate(model, devices)
    shard = shard_fsdp1 if mesh.fsdp == "fsdp1" else shard_fsdp2
    return shard(model, units, mesh, devices, dtype=experiment.dtype)


def _optimizer(model: nn.Module, experiment: Experiment) -> torch.optim.Optimizer:
    # the fused list kernels refuse a mixture of plain and DTensor parameters, which tensor parallelism makes
    foreach = False if experiment.mesh.tp > 1 else None
    if experiment.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=experiment.learning_rate, foreach=foreach)
    return torch.optim.AdamW(model.parameters(), lr=experiment.learning_rate, foreach=foreach)
