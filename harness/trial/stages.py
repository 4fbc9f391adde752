"""Stages of a pipeline: a plain model, cut between blocks, whose parts keep their names.

A model is cut before anything else is done to it but tensor parallelism: chunks, recomputation, FSDP and the
compiler see a model with fewer blocks, `layers.6` and `layers.7` among them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.experiment.mesh import Mesh
from harness.models.base import Batch, StageParts
from harness.trial.plain_model import PlainModel
from strategies import generators


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a pipeline, as a rank holds it.

    Fields:
        index: number of the stage, from the one that reads the batch.
        model: module of the stage.
        units: its blocks by the FQN that they have in the whole model.
    """

    index: int
    model: nn.Module
    units: Mapping[str, nn.Module]


class Stages(nn.Module):
    """The stages of one rank as one model; every module has the name that it has in the whole one.

    Args:
        stages: modules of the stages, at least two; several of them may be the root of the whole model.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the stages, without a level that says of which stage they are."""
        known = set() if memo is None else memo
        for stage in self.stages:
            yield from stage.named_modules(known, prefix, remove_duplicate)


def cut(plain: PlainModel, parts: StageParts, mesh: Mesh, pp_rank: int) -> list[Stage]:
    """Return the stages of a rank; blocks are shared evenly, and the first stages have one more of a rest.

    Args:
        plain: the whole model, which is taken apart.
        parts: what only its first and its last stage have.
        mesh: says how many stages there are, and which of them the rank has.
        pp_rank: index of the rank among those of `pp`.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    names = _shares(list(plain.units), mesh.stages)
    return [
        Stage(
            index=index,
            model=_part_of(plain, parts, names[index], is_first=index == 0, is_last=index == mesh.stages - 1),
            units={name: plain.units[name] for name in names[index]},
        )
        for index in mesh.stages_of(pp_rank)
    ]


def between_stages(plain: PlainModel, parts: StageParts, sample: Batch) -> Tensor:
    """Return zeros like what one stage gives the next, which is what the parts before the blocks give.

    Args:
        plain: the whole model, before tensors of it are sharded.
        parts: what only its first and its last stage have.
        sample: a micro-batch.
    """
    front = _part_of(plain, parts, (), is_first=True, is_last=False)
    with generators.restored(), torch.no_grad(), plain.precision.autocast():
        given: Tensor = front(*sample.inputs)
    dtype = given.dtype if plain.precision.in_units is None else plain.precision.in_units
    return torch.zeros_like(given, dtype=dtype)


def _shares(names: Sequence[str], stages: int) -> list[Sequence[str]]:
    """Return the names of the blocks of each stage."""
    if len(names) < stages:
        problem = f"makes {stages} stages of {len(names)} blocks, which leaves a stage without any"
        raise ConfigError("mesh.pp", f"{problem}; use fewer ranks or stages, or a model with more blocks")
    count, rest = divmod(len(names), stages)
    starts = [index * count + min(index, rest) for index in range(stages + 1)]
    return [names[first:last] for first, last in pairwise(starts)]


def _part_of(
    plain: PlainModel, parts: StageParts, kept: Sequence[str], *, is_first: bool, is_last: bool
) -> nn.Module:
    """Return a module like the whole model, which shares what it keeps of it and has `None` for the rest."""
    whole = plain.model
    left_out = [whole.get_submodule(name) for name in plain.units if name not in kept]
    for names, is_here in ((parts.first, is_first), (parts.last, is_last)):
        left_out += [getattr(whole, name) for name in names if not is_here]
    gone = {id(each) for each in left_out}
    # a deep copy takes what its memo has: the modules that hold blocks are copied, and nothing else is
    memo: dict[int, Any] = {id(each): None if id(each) in gone else each for each in _shared(plain)}
    part = copy.deepcopy(whole, memo)
    for name in plain.units:
        if name not in kept:
            container, _, child = name.rpartition(".")
            delattr(part.get_submodule(container), child)
    return part


def _shared(plain: PlainModel) -> Iterator[nn.Module | Tensor]:
    """Yield the blocks, and the modules, parameters and buffers next to the way from the root to them."""
    way = {""}
    for name in plain.units:
        while name := name.rpartition(".")[0]:
            way.add(name)
    for name in way:
        module = plain.model.get_submodule(name)
        yield from (
            each for child, each in module.named_children() if f"{name}.{child}".strip(".") not in way
        )
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
