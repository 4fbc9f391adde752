"""Steps of models that repeat one block, composed of the steps of two models with few blocks.

A step with n blocks and one with n + 1 are traced in full and compared, change by change of the memory and
operator by operator. Where the second repeats one stretch of the first once more in each phase, a step with
more blocks repeats it as often as it has blocks. What is assumed, because two traces cannot show it:

* The model calls equal blocks one after another, and nothing else in it depends on their number
  (`ModelSpec.repeats_one_block`). That the blocks are equal is looked at: classes, shapes and options of all.
* The strategy does with a block what it does with each (`Strategy.acts_on_each_block_alone`).
* FSDP gathers, reshards and reduces each block as its own unit. DDP does not: it cuts buckets by size.

All else is traced in full: chunks, sharding variants, other models and strategies, and whatever is not found
alike by the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment, name_of
from harness.measure.memory.storage_history import Birth, StorageChange, StorageHistory
from harness.models.base import ModelSpec
from harness.predict.step_log import StepLog
from harness.predict.stretching import Numbered, Numbering, UnlikeError, stretched
from harness.records.measured import SavedTensor, TrainedModel
from strategies import Observation
from strategies.regions.blocks import children_of
from strategies.step.step_recorder import OperatorWork

_Name = TypeVar("_Name")

_FEWEST, _FEWEST_UNITS = 3, 4
"""Blocks of the shorter of the two models; the longer has one more. FSDP treats its last units otherwise."""


def composed(experiment: Experiment, log_of: Callable[[Experiment], StepLog]) -> StepLog | None:
    """Return the log of the step, composed of two shorter ones; `None` where it has to be traced in full.

    Args:
        experiment: what to predict; it has more blocks than the shorter models.
    """
    if not is_repetitive(experiment):
        return None
    few = _few_blocks(experiment)
    shorter, longer = (log_of(_with_blocks(experiment, few + more)) for more in (0, 1))
    with suppress(UnlikeError):
        return _composed(shorter, longer, _n_blocks(experiment) - few - 1, experiment.model.layers_fqn)
    return None


def is_deep(experiment: Experiment) -> bool:
    """Return whether a model has more blocks than the two shorter ones together."""
    return experiment.model.repeats_one_block and _n_blocks(experiment) > 2 * _few_blocks(experiment) + 1


def is_repetitive(experiment: Experiment) -> bool:
    """Return whether the step is expected to do with each block the same."""
    mesh = experiment.mesh
    return (
        experiment.model.repeats_one_block
        and experiment.ac.acts_on_each_block_alone
        and (name_of(experiment.chunk), name_of(experiment.shard)) == ("none", "none")
        and not experiment.is_compiled
        and (mesh.gradient_ranks == 1 or mesh.is_sharded)
        and _has_equal_blocks(experiment.model)
    )


def _few_blocks(experiment: Experiment) -> int:
    return _FEWEST_UNITS if experiment.mesh.is_sharded else _FEWEST


def _n_blocks(experiment: Experiment) -> int:
    blocks: int = getattr(experiment.model, "n_layers")  # noqa: B009 (not every family has it)
    return blocks


def _with_blocks(experiment: Experiment, count: int) -> Experiment:
    return replace(experiment, model=replace(experiment.model, n_layers=count))  # type: ignore[call-arg]


@lru_cache(maxsize=16)
def _has_equal_blocks(spec: ModelSpec) -> bool:
    with torch.device("meta"):
        model = spec.build()
    first, *others = map(_described, children_of(model, spec.layers_fqn).values())
    return len(others) + 1 == getattr(spec, "n_layers") and all(each == first for each in others)  # noqa: B009


def _described(value: Any) -> Any:
    """Return what two equal modules share: classes, shapes and dtypes of tensors, and options."""
    if isinstance(value, nn.Module):
        return type(value), {name: _described(each) for name, each in vars(value).items()}
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        return type(value), [(name, _described(each)) for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_described(each) for each in value]
    return value


def _composed(shorter: StepLog, longer: StepLog, further: int, layers_fqn: str) -> StepLog:
    """Return the log of a deeper model, made of two with fewer blocks."""
    if shorter.assumes != longer.assumes:
        raise UnlikeError("a block more assumes something else")
    names = _BlockNames(layers_fqn)
    return StepLog(
        history=_history(shorter.history, longer.history, further, names),
        operators=_by_phase(shorter.operators, longer.operators, further),
        block_calls=dict(
            stretched(
                list(shorter.block_calls.items()), list(longer.block_calls.items()), further, names.of_calls
            )
        ),
        recomputations=_sums(shorter.recomputations, longer.recomputations, further),
        python_code=_sums(shorter.python_code, longer.python_code, further),
        ranks_per_node=longer.ranks_per_node,
        observation=_observation(shorter.observation, longer.observation, further),
        trained=_trained(shorter.trained, longer.trained, further),
        assumes=longer.assumes,
    )


def _history(
    shorter: StorageHistory, longer: StorageHistory, further: int, names: _BlockNames
) -> StorageHistory:
    """Return the storages of a deeper model, made of those of two with fewer blocks."""
    return StorageHistory(
        start=_sums(shorter.start, longer.start, further),
        start_host_bytes=_sum(shorter.start_host_bytes, longer.start_host_bytes, further),
        stretches=[
            # which block has made what dies where is not told: it would take more blocks to see it repeat
            [change._replace(birth=Birth()) for change in stretched(few, many, further, names.of_changes)]
            for few, many in zip(shorter.stretches, longer.stretches, strict=True)
        ],
        saved=stretched(shorter.saved, longer.saved, further, names.of_saved),
        parameter_bytes=_sum(shorter.parameter_bytes, longer.parameter_bytes, further),
        gradient_bytes=_sum(shorter.gradient_bytes, longer.gradient_bytes, further),
        optimizer_bytes=_sum(shorter.optimizer_bytes, longer.optimizer_bytes, further),
    )


def _by_phase(
    shorter: Sequence[OperatorWork], longer: Sequence[OperatorWork], further: int
) -> list[OperatorWork]:
    unnumbered: Numbering[OperatorWork] = Numbering(split=lambda act: (act, None), join=lambda act, _: act)
    few_phases, many_phases = (
        [list(acts) for _, acts in groupby(acts_of, key=attrgetter("phase"))] for acts_of in (shorter, longer)
    )
    if len(few_phases) != len(many_phases):
        raise UnlikeError("a block more adds a phase to the step")
    phases = zip(few_phases, many_phases, strict=True)
    return [act for few, many in phases for act in stretched(few, many, further, unnumbered)]


def _observation(shorter: Observation, longer: Observation, further: int) -> Observation:
    offloaded_bytes = _sum(shorter.offloaded_bytes, longer.offloaded_bytes, further)
    made = replace(shorter, offloaded_bytes=offloaded_bytes)
    if made != replace(longer, offloaded_bytes=offloaded_bytes) or longer.plan is not None:
        raise UnlikeError("a block more changes what the strategy observes")
    return made


def _trained(shorter: TrainedModel, longer: TrainedModel, further: int) -> TrainedModel:
    elements = _sums(shorter.elements, longer.elements, further)
    changed = _sums(shorter.changed, longer.changed, further)
    made = replace(shorter, elements=elements, changed=changed)
    if made != replace(longer, elements=elements, changed=changed):
        raise UnlikeError("a block more changes what is said of the model")
    return made


def _sums(shorter: Mapping[_Name, int], longer: Mapping[_Name, int], further: int) -> dict[_Name, int]:
    if list(shorter) != list(longer):
        raise UnlikeError("a block more has other parts")
    return {name: _sum(shorter[name], longer[name], further) for name in longer}


def _sum(shorter: int, longer: int, further: int) -> int:
    return longer + further * (longer - shorter)


class _BlockNames:
    """Takes the number of a block from names of modules, `layers.7.attention`, and puts another in.

    Args:
        layers_fqn: FQN of the container of the blocks.
    """

    def __init__(self, layers_fqn: str) -> None:
        self._prefix = f"{layers_fqn}."
        self._known: dict[str, Numbered] = {}
        self.of_changes: Numbering[StorageChange] = Numbering(
            split=lambda change: self._split(change.module, change[:2] + change[3:-1]),
            join=lambda change, number: change._replace(module=self._named(change.module, number)),
        )
        self.of_saved: Numbering[SavedTensor] = Numbering(
            split=lambda saved: self._split(saved.module, replace(saved, module="")),
            join=lambda saved, number: replace(saved, module=self._named(saved.module, number)),
        )
        self.of_calls: Numbering[tuple[str, int]] = Numbering(
            split=lambda call: self._split(call[0], call[1]),
            join=lambda call, number: (self._named(call[0], number), call[1]),
        )

    def _split(self, name: str, others: Hashable) -> Numbered:
        if name not in self._known:
            number, dot, rest = name.removeprefix(self._prefix).partition(".")
            is_in_block = name.startswith(self._prefix) and number.isdigit()
            self._known[name] = (f"{dot}{rest}", int(number)) if is_in_block else (name, None)
        left, number_of_block = self._known[name]
        return (left, others), number_of_block

    def _named(self, name: str, number: int) -> str:
        _, dot, rest = name.removeprefix(self._prefix).partition(".")
        return f"{self._prefix}{number}{dot}{rest}"
