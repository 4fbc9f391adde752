"""A trial's model without memory: whether the strategies fit it, and what they have to show of it.

All of it is planned as for the CPU. Tensors that pretend to be on a GPU open a CUDA context in this process,
and end it where there is no GPU, as on the login node of a cluster. Ranks plan for the device that they have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from harness.errors import ConfigError
from harness.experiment.data import empty_source
from harness.experiment.devices import device_type
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.experiment.training import Training
from harness.models.base import Batch, ModelSpec
from harness.models.parts import made_model
from harness.models.parts.containers import require_container
from harness.trial.parallel import require_shardable
from harness.trial.plain_model import PlainModel
from harness.trial.plan_budget import beside_recomputation
from harness.trial.plan_files import plan_of_rank
from harness.trial.plan_sharding import plan_sharding
from harness.trial.planned_step import planned_step
from harness.trial.precision import Precision
from harness.trial.preflight import owner_of_view
from harness.trial.split_check import check_split
from harness.trial.stages import Cut
from strategies import (
    InfeasibleBudget,
    OffersPlans,
    Strategy,
    generators,
)
from strategies.regions.blocks import children_of
from strategies.tracing.balanced_routing import BalancedFakes
from strategies.tracing.following import as_with_data

_META = torch.device("meta")
PLANNED_FOR = "cpu"
"""Type of the device for which all is planned here."""

ELSEWHERE = "# planned with the kernels of the CPU; ranks plan with those of CUDA, whose bytes may differ"
"""Line above a view of a plan that ranks make otherwise."""


def check_variant(
    model: ModelSpec, ac: Strategy, is_call_site: bool, training: Training, batch: tuple[int, int]
) -> None:
    """Refuse a model that cannot be trained as asked, and an AC variant or FSDP units that do not fit it.

    Args:
        is_call_site: it stands around the call of the whole model.
        batch: samples of one rank, and tokens of each.

    Raises:
        ConfigError: `layers_fqn` names no container of blocks; a parameter cannot be cast, sharded or
            updated.
        StrategyError: the variant does not fit.
    """
    built, sample = _without_memory(model, batch)
    require_container(built, model.layers_fqn)
    made_model.require_trainable(built, optimizer=training.optimizer, is_sharded=training.fsdp is not None)
    Precision(asked=training.dtype, casts_buffers=model.casts_buffers()).cast(built)
    if training.fsdp is not None:
        units = children_of(built, model.layers_fqn) if model.layers_fqn else {}
        require_shardable(built, units, training.fsdp, use_orig_params=training.use_orig_params)
    if is_call_site:
        ac.call_site(built)
        return
    built = ac.apply(built, sample.inputs)
    if training.fsdp and model.layers_fqn:
        ac.check_units(built, children_of(built, model.layers_fqn))


def check_stages(model: ModelSpec, acs: Sequence[Strategy], mesh: Mesh, batch: tuple[int, int]) -> None:
    """Refuse a model that cannot be cut into the stages of a mesh, and an AC variant that does not fit one.

    Args:
        batch: samples of a micro-batch on one rank, and tokens of each.

    Raises:
        StrategyError: the model cannot be cut so, or the variant does not fit a stage.
    """
    planned_for = torch.device(PLANNED_FOR)
    with as_with_data(), BalancedFakes():
        with planned_for:
            built = model.build()
        sample = _batch(model, batch).changed(
            lambda tensor: torch.empty_like(tensor, device=planned_for, requires_grad=tensor.requires_grad)
        )
        plain = PlainModel(
            model=built,
            loss=model.loss,
            precision=Precision(asked="own", casts_buffers=False),
            units=children_of(built, model.layers_fqn) if model.layers_fqn else {},
        )
        try:
            cut = Cut.of(model, plain, mesh, sample)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return  # ranks have the data that forward asks for
        between = cut.between(plain, planned_for)
        for rank in range(mesh.pp):
            first = next(each for each in range(mesh.world_size) if mesh.coordinate(each).pp == rank)
            for index in mesh.stages_of(rank):
                of_rank = plan_of_rank(acs[index], mesh, first)
                of_rank.apply(cut.stage(plain, index).model, (between,) if index else sample.inputs)


def check_dispatch(model: ModelSpec) -> None:
    """Refuse experts that ranks cannot share, or that would compute otherwise then.

    Raises:
        ConfigError: naming their class.
    """
    with generators.restored(), _META:
        built = model.build()
    model.check_dispatch(built)


def check_tensor_parallel_plan(model: ModelSpec, tp: int, batch: tuple[int, int]) -> None:
    """Refuse a tensor parallel plan that does not fit the model.

    Args:
        tp: number of ranks that share tensors.
        batch: samples of one rank, and tokens of each.

    Raises:
        ConfigError: naming the pattern or the module.
    """
    check_split(model, _batch(model, batch).to(_META), tp)


def check_sharding(model: ModelSpec, experiment: Experiment) -> None:
    """Refuse a sharding variant that finds no plan for the model.

    Raises:
        ConfigError: the model takes an input by name alone.
        StrategyError: naming the operator or the limit.
    """
    batch = experiment.samples_per_forward, experiment.sequence_length
    sample = _batch(model, batch)
    _require_positions(sample, "shard")
    plan_sharding(experiment, sample.inputs, torch.device(PLANNED_FOR))


def check_chunk(model: ModelSpec, experiment: Experiment) -> None:
    """Refuse a chunk variant that finds no plan for the step, or does not fit the units of FSDP.

    Kernels of another device may keep a budget that the CPU's do not: there the ranks decide. So they do
    where the plan of AC has the chunks.

    Raises:
        ConfigError: the model takes an input by name alone.
        StrategyError: naming the operator, the budget or the unit.
    """
    if (offers := experiment.chunk.chunk_offers) is not None:
        _check_offers(experiment, offers)
        return
    chunk, built, sample = _planned(experiment, experiment.chunk)
    _require_positions(sample, "chunk")
    try:
        built = chunk.apply(built, sample.inputs)
    except InfeasibleBudget:
        if is_elsewhere(experiment):
            return
        raise
    if experiment.mesh.is_sharded and model.layers_fqn:
        chunk.check_units(built, children_of(built, model.layers_fqn))


def _check_offers(experiment: Experiment, offers: OffersPlans) -> None:
    """Refuse a model of which no chunks can be planned, or units of FSDP that no program calls."""
    plain, sample = _plain_without_memory(experiment)
    _require_positions(sample, "chunk")
    step = planned_step(beside_recomputation(experiment), plain, sample, torch.device(PLANNED_FOR))
    offers.check_offers(plain.model, sample.inputs, step)
    if experiment.mesh.is_sharded:
        experiment.chunk.check_units(plain.model, step.units)


def _require_positions(sample: Batch, group: str) -> None:
    """Refuse inputs that have no position, which a plan of positional inputs would leave out."""
    if sample.keywords:
        names = ", ".join(map(repr, sample.keywords))
        problem = f"plans inputs by position, but forward takes {names} by name, one of them by name alone"
        raise ConfigError(group, f"{problem}; let forward take all of them by position, or use {group}=none")


def _planned(experiment: Experiment, strategy: Strategy) -> tuple[Strategy, nn.Module, Batch]:
    """Return a strategy for the step of `experiment`, with a model and a rank's batch without memory."""
    plain, sample = _plain_without_memory(experiment)
    step = planned_step(experiment, plain, sample, torch.device(PLANNED_FOR))
    return strategy.for_step(step), plain.model, sample


def _plain_without_memory(experiment: Experiment) -> tuple[PlainModel, Batch]:
    """Return the model of `experiment` and a rank's batch without memory, in its precision."""
    batch = experiment.samples_per_forward, experiment.sequence_length
    built, sample = _without_memory(experiment.model, batch)
    return PlainModel.cast(experiment, built, experiment.model.loss, torch.device(PLANNED_FOR)), sample


def show(experiment: Experiment, what: str) -> str:
    """Return what a strategy of `experiment` has to show.

    Args:
        experiment: experiment of one trial; nothing of it runs.
        what: a view of one of its strategies.

    Raises:
        ConfigError: none of them has such a view.
        StrategyError: the strategy does not suit the model.
    """
    owner = owner_of_view(experiment, what)
    strategy, built, sample = _planned(experiment, owner)
    view = strategy.view(what, built, sample.inputs, sample.keywords)
    is_planned = strategy is not owner
    return f"{ELSEWHERE}\n{view}" if is_planned and is_elsewhere(experiment) else view


def is_elsewhere(experiment: Experiment) -> bool:
    """Return whether ranks compute on another device than plans here are made for."""
    return device_type(experiment.mesh) != PLANNED_FOR


def _without_memory(model: ModelSpec, batch: tuple[int, int]) -> tuple[nn.Module, Batch]:
    with _META:
        built = model.build()
    return built, _batch(model, batch)


def _batch(model: ModelSpec, batch: tuple[int, int]) -> Batch:
    fixed = model.fixed_batch(device="meta")
    if fixed is not None:
        return fixed
    rows, tokens = batch
    return empty_source(model, sequence_length=tokens).batch(step=0, batch_size=rows, seed=0).to(_META)
