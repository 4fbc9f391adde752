"""Stages of a pipeline: a plain model, cut between blocks, whose parts keep their names.

A model is cut before anything else is done to it but tensor parallelism: chunks, recomputation, FSDP and the
compiler see a model with fewer blocks, `layers.6` and `layers.7` among them.

A stage runs the forward of the whole model. Where that calls the block before its own, what the stage before
gives comes back; where it calls the block after its own, forward is left. What only others have is
`Elsewhere`: nothing is computed of it. Any forward that calls its blocks one after the other can be cut so,
and before a stage is used, all stages together have given what the whole model gives, bit for bit.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves

from harness.experiment.mesh import Mesh
from harness.models.base import Batch, ModelSpec
from harness.models.parts.containers import require_container
from harness.trial.block_flow import BlockFlow, PassedOn, forward_alone
from harness.trial.elsewhere import Elsewhere, ElsewhereError
from harness.trial.plain_model import PlainModel
from strategies import StrategyError
from strategies.chunk.running.proof import has_values
from strategies.regions.block_search import is_under
from strategies.regions.blocks import AbsentBlock, Disguised, children_of
from strategies.tracing.module_state import HOOKS


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a pipeline, as a rank holds it.

    Fields:
        index: number of the stage, from the one that reads the batch.
        units: its blocks by the FQN that they have in the whole model.
    """

    index: int
    model: nn.Module
    units: Mapping[str, nn.Module]


class Stages(nn.Module):
    """The stages of one rank as one model; every module has the name that it has in the whole one.

    Args:
        stages: modules of the stages, at least two; several of them may be the root of the whole model, and
            DDP may hold each.
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
            held = stage.module if isinstance(stage, DistributedDataParallel) else stage
            for name, module in held.named_modules(known, prefix, remove_duplicate):
                if not _is_elsewhere(module):
                    yield name, module


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The way in which a model is cut into stages.

    Fields:
        stages: names of the blocks of each stage.
        where: option that a refusal names.
    """

    flow: BlockFlow
    stages: tuple[Sequence[str], ...]
    where: str

    @classmethod
    def of(cls, spec: ModelSpec, plain: PlainModel, mesh: Mesh, sample: Batch) -> Cut:
        """Return how a model is cut: blocks are shared evenly, and the first stages have one more of a rest.

        The stages are run one after the other: they give what the model gives, or are refused.

        Args:
            plain: the whole model, before tensors of it are sharded; it stays as it is.

        Raises:
            StrategyError: there are fewer blocks than stages, or the model cannot be cut between them.
        """
        where, containers = spec.split_at()
        for fqn in containers:
            require_container(plain.model, fqn, where)
        blocks = {name: each for fqn in containers for name, each in children_of(plain.model, fqn).items()}
        shares = _shares(list(blocks), mesh.stages)
        flow, outputs = BlockFlow.of(plain, blocks, sample, where)
        ends = [0]
        for share in shares:
            ends.append(ends[-1] + len(share))
        made = cls(flow=flow, stages=tuple(flow.blocks[a:b] for a, b in pairwise(ends)), where=where)
        made._require_own_weights(plain.model)
        made._prove(plain, sample, outputs)
        return made

    def rank(self, plain: PlainModel, mesh: Mesh, pp_rank: int) -> list[Stage]:
        """Return the stages of a rank, which share what they keep with the whole model.

        Args:
            plain: the whole model, whose tensors may be sharded.
            pp_rank: index of the rank among those of `pp`.
        """
        return [self.stage(plain, index) for index in mesh.stages_of(pp_rank)]

    def stage(self, plain: PlainModel, index: int) -> Stage:
        """Return one stage."""
        own = self.stages[index]
        units = {
            name: unit for name, unit in plain.units.items() if any(is_under(name, block) for block in own)
        }
        return Stage(index=index, model=_Cutter(self, plain.model, index).part(), units=units)

    def between(self, plain: PlainModel, device: torch.device, *, parts: int = 1) -> Tensor:
        """Return zeros like what one stage gives the next.

        Args:
            device: device of the zeros.
            parts: number of ranks that have a part of its sequence each, as under `mesh.sp`.
        """
        like = self.flow.like_between()
        dtype = like.dtype if plain.precision.in_units is None else plain.precision.in_units
        sizes = list(like.shape)
        if parts > 1:
            sizes[1] //= parts
        return torch.zeros(sizes, dtype=dtype, device=device)

    def stage_of(self, block: int) -> int:
        """Return the stage of a block by the number of its call."""
        name = self.flow.blocks[block]
        return next(index for index, names in enumerate(self.stages) if name in names)

    def owner(self, parameter: str) -> int:
        """Return the stage of a parameter; the first one has those that nobody reads."""
        return min((self.stage_of(block) for block in self.flow.readers[parameter]), default=0)

    def _require_own_weights(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            readers = {self.stage_of(block) for block in self.flow.readers[name]}
            if len(readers) > 1:
                stages = " and ".join(map(str, sorted(readers)))
                every = model.named_parameters(remove_duplicate=False)
                called = " or ".join(repr(other) for other, each in every if each is parameter)
                problem = f"stages {stages} both read {called}, and a weight is in one stage"
                remedy = "untie them, or use mesh.pp=1 without its options"
                raise StrategyError(self.where, f"{problem}; {remedy}")

    def _prove(self, plain: PlainModel, sample: Batch, outputs: Any) -> None:
        """Refuse stages that do not give together what the model gives, its `outputs`."""
        given: Any = None
        with forward_alone(plain):
            for index in range(len(self.stages)):
                taken = (given,) if index else sample.inputs
                named = {} if index else sample.keywords
                given = self.stage(plain, index).model(*taken, **named)
        tensors = [each for each in tree_leaves((sample.inputs, given)) if isinstance(each, Tensor)]
        if has_values(plain.model, tensors) and not _are_equal(given, outputs):
            problem = "stages one after the other give something else than the whole model"
            raise StrategyError(self.where, f"{problem}; use mesh.pp=1 without its options")

    def refusal(self, index: int, problem: str) -> StrategyError:
        """Return the refusal of a stage that asks for what it does not have."""
        said = f"stage {index} of {len(self.stages)} cannot run alone: {problem}, which another stage has"
        remedy = "or a model whose blocks read nothing of others but what the one before gives"
        return StrategyError(self.where, f"{said}; use mesh.pp=1 without its options, {remedy}")


@dataclass(kw_only=True, slots=True)
class _Route:
    """The way of a forward through one stage.

    Fields:
        refusal: makes the error of a stage that asks for what it does not have.
        inputs, keywords: what the forward of the whole model is called with; `None`: what the stage is.
    """

    refusal: Callable[[str], StrategyError]
    inputs: tuple[Any, ...] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    given: Tensor | None = None


class _Left(BaseException):
    """A forward is left with what the last block of the stage has given; no code of a model may catch it."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given


class _OnStage(Disguised):
    """Put before the class of a model: its forward runs through one stage."""

    _route: _Route

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the last block of the stage gives, or what the model does.

        Raises:
            StrategyError: the forward asks for what another stage has, in this call at least.
        """
        route = self._route
        if route.inputs is not None:
            (route.given,) = args
            args, kwargs = route.inputs, dict(route.keywords)
        try:
            outputs = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class behind
        except _Left as left:
            outputs = left.given
        except ElsewhereError as error:
            raise route.refusal(str(error)) from error
        finally:
            route.given = None
        lost = next((each for each in tree_leaves(outputs) if isinstance(each, Elsewhere)), None)
        if lost is not None:
            raise route.refusal(f"what it gives follows from {lost.origin}")
        return outputs


class _Earlier(AbsentBlock):
    """A block of a stage before: gives what it passes on, where the next block is of this stage."""

    def __init__(self, passed: PassedOn, route: _Route | None) -> None:
        super().__init__()
        self._passed = passed
        self._route = route

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the output of the block."""
        return self._passed.output(None if self._route is None else self._route.given)


class _Later(AbsentBlock):
    """A block of a stage after: ends the forward."""

    def __init__(self, passed: PassedOn) -> None:
        super().__init__()
        self._passed = passed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the forward with what the block before has given."""
        raise _Left(self._passed.taken(args, kwargs))


class _Cutter:
    """Makes a part of a model. `index`: number of the stage."""

    def __init__(self, cut: Cut, whole: nn.Module, index: int) -> None:
        self._cut = cut
        self._whole = whole
        self._index = index
        flow = cut.flow
        self._route = _Route(refusal=partial(cut.refusal, index))
        if index:
            self._route.inputs, self._route.keywords = flow.inputs, flow.keywords

    def part(self) -> nn.Module:
        """Return a module like the whole model, which shares blocks and tensors of the stage with it."""
        own = set(self._cut.stages[self._index])
        blocks = {name: self._whole.get_submodule(name) for name in self._cut.flow.blocks}
        # a deep copy takes what its memo has
        memo: dict[int, Any] = {}
        for number, (name, block) in enumerate(blocks.items()):
            memo[id(block)] = block if name in own else self._absent(number)
        for tensor in (*self._whole.parameters(), *self._whole.buffers()):
            memo[id(tensor)] = tensor
        part = copy.deepcopy(self._whole, memo)
        for name, module in part.named_modules():
            if not any(is_under(name, block) for block in blocks):
                self._empty(name, module)
        cls = type(part)
        part.__class__ = type(cls.__name__, (_OnStage, cls), {"__module__": cls.__module__})
        part.__dict__["_route"] = self._route
        return part

    def _absent(self, number: int) -> AbsentBlock:
        """Return what stands where a block of another stage is called."""
        flow, first = self._cut.flow, sum(len(names) for names in self._cut.stages[: self._index])
        if number > first:
            return _Later(flow.passed[number - 1])
        return _Earlier(flow.passed[number], self._route if number == first - 1 else None)

    def _empty(self, name: str, module: nn.Module) -> None:
        """Take the parameters of other stages out of a module, and its buffers where none is left."""
        begins = f"{name}." if name else ""
        own = module._parameters  # noqa: SLF001 (named_parameters leaves repetitions out)
        gone = [
            each
            for each, value in own.items()
            if value is not None and self._cut.owner(f"{begins}{each}") != self._index
        ]
        if not gone:
            return
        held: dict[str, Tensor] = {each: own.pop(each) for each in gone}  # type: ignore[misc]  # not `None`
        if not any(value is not None for value in own.values()):
            buffers = module._buffers  # noqa: SLF001 (its own)
            held |= {each: buffers.pop(each) for each in list(buffers) if buffers[each] is not None}  # type: ignore[misc]  # as above
            for hooks in HOOKS:
                module.__dict__[hooks] = OrderedDict()
        for each, tensor in held.items():
            module.__dict__[each] = Elsewhere.like(tensor, repr(f"{begins}{each}"))


def _is_elsewhere(module: nn.Module) -> bool:
    """Return whether a module is a block, or has lost weights, of another stage."""
    return isinstance(module, AbsentBlock) or (
        not module._parameters and any(isinstance(each, Elsewhere) for each in vars(module).values())  # noqa: SLF001 (its own)
    )


def _are_equal(actual: Any, expected: Any) -> bool:
    (ours, structure), (theirs, other) = tree_flatten(actual), tree_flatten(expected)
    return structure == other and all(
        torch.equal(one, two)
        if isinstance(one, Tensor) and isinstance(two, Tensor)
        else type(one) is type(two)
        for one, two in zip(ours, theirs, strict=True)
    )


def _shares(names: Sequence[str], stages: int) -> list[Sequence[str]]:
    """Return the names of the blocks of each stage."""
    if len(names) < stages:
        problem = f"makes {stages} stages of {len(names)} blocks, which leaves a stage without any"
        raise StrategyError("mesh.pp", f"{problem}; use fewer ranks or stages, or a model with more blocks")
    count, rest = divmod(len(names), stages)
    starts = [index * count + min(index, rest) for index in range(stages + 1)]
    return [names[first:last] for first, last in pairwise(starts)]
