"""The contract of a strategy: it takes a model and returns a model, or refuses with a `StrategyError`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    get_args,
    get_type_hints,
)

from strategies.text_files import read_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_SIMPLE = frozenset({bool, int, str, NoneType})


class StrategyError(ValueError):
    """A strategy cannot be applied as asked.

    Args:
        where: what the user can change, as a configuration path (`ac.ac_freq`).
        problem: what is wrong and what would be right, `must be at least 1, got 0`.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class InfeasibleBudget(StrategyError):  # noqa: N818 (its public name)
    """No plan that was found keeps the budget; with the kernels of another device one may.

    Args:
        where: the configuration path of the budget.
        minimum_feasible_bytes: smallest activation peak that a plan reaches.
        reasons: what keeps plans from less, for the end of the message.
    """

    def __init__(self, where: str, budget_bytes: int, minimum_feasible_bytes: int, reasons: str = "") -> None:
        super().__init__(
            where,
            f"no plan keeps activations within {budget_bytes} bytes; "
            f"the smallest reachable peak is {minimum_feasible_bytes} bytes{reasons}",
        )
        self.budget_bytes = budget_bytes
        self.minimum_feasible_bytes = minimum_feasible_bytes
        # what makes it again in the process that asked for the plan
        self.args = (where, budget_bytes, minimum_feasible_bytes, reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """The difference that a strategy may make to numbers, and why exact equality cannot be had.

    Fields:
        relative: largest accepted |actual - expected| / max|expected| of one tensor.
        reason: why results cannot be equal; the record shows it next to the verdict.
        parameters: the same for parameters after the optimizer step; `None`: `relative`.
        floor: share of the largest tensor of a kind. Smaller tensors are compared with that share: a gradient
            that cancels to zero, such as that of a key's bias, is rounding noise, and its parameter may move
            by the learning rate.
        stride: what a parameter whose gradient is zero but for rounding, by `floor`, may drift in a step: an
            optimizer that divides gradients by their own size makes whole steps of rounding.
    """

    relative: float
    reason: str
    parameters: float | None = None
    floor: float = 0.0
    stride: float = 0.0

    @property
    def bounds(self) -> str:
        """Return `relative` and `parameters`, as a sentence has them behind "within"."""
        if self.parameters in (None, self.relative):
            return f"{self.relative:g}"
        return f"{self.relative:g}, parameters within {self.parameters:g},"

    @property
    def exception(self) -> str:
        """Return which tensors are measured otherwise, in brackets; empty where none is."""
        return f" (tensors below {100 * self.floor:g} % of the largest: of that)" if self.floor else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The acts of a strategy in the latest step of one model, counted by the strategy itself.

    Fields:
        named: operators and groups that the configuration names, as the user wrote them; for a preset, its
            operators.
        never_fired: names of `named` that matched no operator inside a region.
        offloaded_bytes: bytes moved to host memory, each storage once.
        chunks: number of chunk bodies that ran.
        plan: the strategy's decisions, as JSON values; `None` where it decides nothing.
        unneeded: reason why the strategy rightly did nothing; `None` where it did something.
    """

    named: tuple[str, ...] = ()
    never_fired: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    chunks: int = 0
    plan: dict[str, Any] | None = None
    unneeded: str | None = None

    def joined(self, other: Observation) -> Observation:
        """Return what two stages of one model show together; lists in their plans follow one another.

        Stages that share one plan have it once.
        """
        plan = self.plan or other.plan
        if self.plan and other.plan and self.plan != other.plan:
            plan = {
                name: [*first, *other.plan[name]] if isinstance(first, list) else first
                for name, first in self.plan.items()
            }
        return Observation(
            named=tuple(dict.fromkeys((*self.named, *other.named))),
            never_fired=tuple(
                name
                for name in dict.fromkeys((*self.never_fired, *other.never_fired))
                if all(name in each.never_fired or name not in each.named for each in (self, other))
            ),
            offloaded_bytes=self.offloaded_bytes + other.offloaded_bytes,
            chunks=self.chunks + other.chunks,
            plan=plan,
            unneeded=self.unneeded and other.unneeded,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A transformation of a model that must not change its mathematics.

    Subclasses are frozen dataclasses. Their fields are their configuration; `__post_init__` refuses a value
    out of range. A strategy holds no state: one strategy can be applied to several models of a process.

    Only `apply` must be written. Other methods are the stages at which a strategy may take part, in order:
    planning, compilation, distribution over a mesh, the call of a training loop, and what a person is shown.
    Their defaults do nothing.

    Attributes:
        tolerance: how far results may move in fp32; `None` where they are bitwise equal to the plain model's.
        reduced_tolerance: the same in half precision, where it is another.
        acts_on_each_block_alone: whether it does with a block what it does with each equal one, whatever
            their number: no budget, count or plan spans blocks. A step is then predicted from few blocks.
        scales_with_batch: whether it does the same with more samples, as far as no size becomes larger than
            another: no plan is made of bytes. Steps are then predicted from those of other batch sizes.
        reads_parameters: whether `apply` needs the shapes of parameters, which FSDP1 flattens.
        needs_instructions: whether the user says what it does, by names, a file or code; then there is no
            default that could be compared with others.
        views: names that `view` knows.
    """

    tolerance: ClassVar[Tolerance | None] = None
    reduced_tolerance: ClassVar[Tolerance | None] = None
    acts_on_each_block_alone: ClassVar[bool] = False
    scales_with_batch: ClassVar[bool] = False
    reads_parameters: ClassVar[bool] = False
    needs_instructions: ClassVar[bool] = False
    views: ClassVar[tuple[str, ...]] = ()

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:
        """Return the model to use; it may be `model` itself, changed in place.

        Args:
            model: a plain, sharded or meta-device module.
            sample: example positional inputs; meta tensors are enough.

        Raises:
            StrategyError: the model is unsuitable, or carries the strategy already.
        """
        raise NotImplementedError

    def runs_user_code(self) -> bool:
        """Return whether `apply` runs code of the user's, which may raise, hang or end the process."""
        return False

    @property
    def unsplittable(self) -> str:
        """The name of what recomputes a region once, in a backward of one piece; empty where parts suit."""
        return ""

    @property
    def step_planner(self) -> PlansFromStep | None:
        """The strategy itself, where its plan is made of a step that the plain model takes."""
        return None

    @property
    def chunk_offers(self) -> OffersPlans | None:
        """The strategy itself, where it leaves its budget to the `step_planner` and offers it plans."""
        return None

    @property
    def follows(self) -> bool:
        """True if it has no budget of its own: that of the `step_planner` counts for both."""
        return False

    def for_step(
        self,
        step: PlannedStep,  # noqa: ARG002 (the default plans nothing)
        plans: MutableMapping[str, Any] | None = None,  # noqa: ARG002 (as above)
        key: str = "",  # noqa: ARG002 (as above)
    ) -> Strategy:
        """Return the strategy with plans for the training step that the model is part of.

        Args:
            step: around the model.
            plans: those of earlier models by their keys, in the strategy's own form; a new one is added.
            key: equal for equal models in equal steps, which share one plan.
        """
        return self

    def has_loss(self, model: nn.Module) -> bool:  # noqa: ARG002 (the default leaves the loss outside)
        """Say if `model`, which `apply` returned, gives the loss where its last input is `LossInputs`."""
        return False

    def check_compilation(self, order: str, scope: str) -> None:
        """Refuse places in or around compiled code where its regions were seen not to work.

        Args:
            order: `ac_first` where compiled code holds the regions, `compile_first` where regions hold it.
            scope: `blocks` or `model`: what is compiled.

        Raises:
            StrategyError: naming the option to change.
        """

    @property
    def partitioner(self) -> Mapping[str, Any]:
        """Settings of `torch._functorch.config` while the model is compiled, and only then."""
        return {}

    @property
    def needs_compiler(self) -> bool:
        """True if only a compiler carries it out: under `partitioner`, or by `partitions`."""
        return bool(self.partitioner)

    def partitions(self, model: nn.Module, compiler: str) -> Mapping[str, Partition]:  # noqa: ARG002 (it plans none)
        """Return the partition functions of blocks by FQN; equal ones may share what is compiled.

        Args:
            model: a model that `apply` returned.
            compiler: the backend of `torch.compile`.

        Raises:
            StrategyError: they are made for another compiler or model.
        """
        return {}

    def enclose_beside(self, model: nn.Module) -> None:
        """Put regions around what is not compiled, once the blocks are compiled with `partitions`."""

    def check_units(self, model: nn.Module, units: Collection[str]) -> None:
        """Refuse units of FSDP that the strategy does not suit.

        Args:
            model: what `apply` returned.
            units: plain FQNs of the modules that will be FSDP units.

        Raises:
            StrategyError: naming the unit.
        """

    def call_site(self, model: nn.Module) -> CallSite:  # noqa: ARG002 (refused whatever the model)
        """Return what a training loop calls instead of `model`, which stays as it is.

        Raises:
            StrategyError: the strategy does not stand around calls, or does not suit this model.
        """
        name = type(self).__name__
        raise StrategyError("wrap_order", f"call_site does not suit {name}; use inside_fsdp")

    def observe(self, model: nn.Module) -> Observation:  # noqa: ARG002 (the default has nothing to look at)
        """Return what the latest training step of `model` showed."""
        return Observation()

    def view(
        self,
        name: str,
        model: nn.Module,
        sample: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a view as text, of what the strategy does to a model.

        Args:
            name: one of `views`.
            model: a plain model, to which the strategy is applied; on the meta device is enough.
            sample: example positional inputs.
            keywords: inputs that the model takes by name alone.

        Raises:
            StrategyError: the model is unsuitable.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """The training step around the model, as far as a plan depends on it.

    Fields:
        loss: function of the model's results, followed by `loss_inputs`; its bytes are counted. `None`: the
            sum of all elements of the results.
        loss_inputs: further arguments of `loss`, such as targets.
        may_join_loss: whether `loss` reads its arguments only, so that a plan may make it part of the model.
        reserved_bytes: bytes that others hold during the whole step; they count as activations.
        enclose: wraps the model in place as the trial will (for example with AC regions); called as
            `enclose(model, example_inputs)`, returns the callable to run. `None`: the model runs as it is.
        device: device on which the step runs; `None`: that of the example inputs.
        autocast: makes the context in which model and loss run.
        computes_in: dtype to which FSDP casts parameters in use and inputs of its units; `None`: no cast.
        units: FQNs of the FSDP units.
    """

    loss: Callable[..., Tensor] | None = None
    loss_inputs: tuple[Any, ...] = ()
    may_join_loss: bool = False
    reserved_bytes: int = 0
    enclose: Callable[[nn.Module, tuple[Any, ...]], Callable[..., Any]] | None = None
    device: torch.device | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    computes_in: torch.dtype | None = None
    units: tuple[str, ...] = ()


def alone(*numbers: int) -> tuple[int, ...]:
    """Return the numbers as they are: there are no other ranks whose numbers may be larger."""
    return numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnableStep:
    """The training step of one rank, as the plain model takes it.

    Fields:
        run: takes the step, as often as it is called; no parameter moves.
        model: the model, with the wrappers of its mesh.
        standing: tensors that lie there during the whole step.
        around: makes the context in which steps run.
        compiler: backend of `torch.compile` that compiles blocks later; here none is compiled.
        unwrapped: makes the context in which compiled functions are called: functions of torch that the step
            has replaced are as they were.
        chunk: the plan of the chunks in which parts of the model run, as JSON values; `None`: nothing does.
        stages: the stages of a pipeline that the rank has, by number, as they are called; none of a whole
            model. A schedule calls their blocks once for each micro-batch of the step.
        most: returns the largest of the numbers that ranks with unlike steps give, in their order: a peak of
            the plain step, and the smallest peak that a plan reaches.
        lasting: names of operators that no plan runs again, such as `aten.topk.default` where tokens go to
            experts of other ranks.
    """

    run: Callable[[], object]
    model: nn.Module
    device: torch.device
    standing: tuple[Tensor, ...]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiler: str = "none"
    unwrapped: Callable[[], AbstractContextManager[Any]] = nullcontext
    chunk: Mapping[str, Any] | None = None
    stages: Mapping[int, nn.Module] = field(default_factory=dict)
    most: Callable[..., tuple[int, ...]] = alone
    lasting: frozenset[str] = frozenset()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The stages, or the whole model."""
        return tuple(self.stages.values()) or (self.model,)


class PlansFromStep(Protocol):
    """A strategy whose plan is made of a step that the plain model takes, for all ranks alike."""

    @property
    def plan_file(self) -> str | None:
        """The file of a given plan; `None` where one is to be made."""

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that it cannot plan for, on every rank, before one of them waits in a step.

        Raises:
            StrategyError: what it plans for is not there.
        """

    def write_best_plan(self, steps: Iterable[RunnableStep], file: Path, *, spare_bytes: int = 0) -> None:
        """Make the cheapest plan of a step that can be taken in several ways, and write it to `file`.

        Args:
            steps: without chunks, then in chunks of several plans; each is done with when the next comes.
            file: what it is written to.
            spare_bytes: bytes below its budget that the plan is to stay.

        Raises:
            StrategyError: there is no plan.
        """

    def attend_plan(self, step: RunnableStep) -> None:
        """Take a step as `write_best_plan` takes it on another rank, which plans: collectives match.

        Raises:
            StrategyError: the step is not one that a plan can be made for.
        """

    def with_plan(self, file: Path) -> Strategy:
        """Return the strategy with the plan in `file`."""


class OffersPlans(Protocol):
    """A strategy that leaves its budget to one that plans from a step, and offers it plans to choose from."""

    def offers(
        self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep
    ) -> Sequence[Mapping[str, Any]]:
        """Return plans of `model`, as JSON values.

        Args:
            sample: positional inputs.
            step: around the model.

        Raises:
            StrategyError: the model is unsuitable.
        """

    def check_offers(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> None:
        """Refuse a model that `offers` would refuse, sooner; arguments are those of `offers`.

        Raises:
            StrategyError: the model is unsuitable.
        """

    def with_plan(self, file: Path) -> Strategy | None:
        """Return the strategy that carries out the offer in a plan file; `None` where there is none in it.

        Raises:
            StrategyError: it is no plan file.
        """


def held_chunks(file: Path) -> Mapping[str, Any] | None:
    """Return the chunk plan in a plan file, as JSON values; `None` where nothing runs in chunks.

    Raises:
        StrategyError: it cannot be read, or is no plan file.
    """
    try:
        held = json.loads(read_text(file))["chunk"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise StrategyError("ac.plan_file", f"{str(file)!r} holds no plan of this version") from None
    return held if isinstance(held, dict) else None


class LossInputs(NamedTuple):
    """The last positional input of a model that goes on to its loss: what the loss takes besides results."""

    values: tuple[Any, ...]


class Partition(Protocol):
    """A partition function, as AOTAutograd calls it."""

    def __call__(self, joint_module: Any, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        """Return the graphs of forward and backward."""


def refuse_named_inputs(view: str, keywords: Mapping[str, Any] | None) -> None:
    """Refuse a model that takes inputs by name alone, for a view that follows positions.

    Raises:
        StrategyError: it does.
    """
    if keywords:
        problem = (
            f"{view} follows inputs by position, and the model takes {', '.join(keywords)} by name alone"
        )
        raise StrategyError("show", f"{problem}; give them positions")


class CallSite(Protocol):
    """A model as a training loop calls it, with a strategy around the call and the model untouched."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model."""

    def observe(self) -> Observation:
        """Return what the latest step showed."""


def take_names(strategy: Any, where: str, kind: str) -> None:
    """Make a tuple of the list of names in a field; call it in `__post_init__`.

    Args:
        where: the option, `ac.keep`, whose last part is the field.
        kind: what the names are, for the message.

    Raises:
        StrategyError: the field is no list of names, or one of them is empty.
    """
    name = where.rpartition(".")[2]
    given = getattr(strategy, name)
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(isinstance(each, str) and each for each in given):
        raise StrategyError(where, f"must be a list of {kind}, got {given!r}")
    object.__setattr__(strategy, name, tuple(given))


_type_hints = cache(get_type_hints)


def check_simple_fields(group: str, strategy: Any) -> None:
    """Refuse a value whose type is not the declared one, in fields of `bool`, `int`, `str` and `None`.

    Args:
        group: the configuration group that the message names, `ac`.
        strategy: the strategy or sharding to look at; fields of other types are not checked.

    Raises:
        StrategyError: naming the first such field; a `bool` is no `int`.
    """
    hints = _type_hints(strategy.__class__)
    for each in fields(strategy):
        hint = hints[each.name]
        accepted = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        value = getattr(strategy, each.name)
        if set(accepted) <= _SIMPLE and type(value) not in accepted:
            names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in accepted)
            raise StrategyError(f"{group}.{each.name}", f"must be {names}, got {value!r}")
