"""The contract of a strategy: it takes a model and returns a model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, get_args, get_type_hints

from strategies.errors import StrategyError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_SIMPLE = frozenset({bool, int, str, NoneType})


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far a strategy may move the numbers, and why exact equality cannot be had.

    Fields:
        relative: largest accepted |actual - expected| / max|expected| of one tensor.
        reason: the written reason; it stands in the record beside the verdict.
        parameters: the same of parameters after the optimizer step, where it is another.
        floor: tensors below this share of the largest of their kind are measured by it: what cancels to
            nothing, as the gradient of a key's bias does, is rounding noise that no other sum repeats, and
            its parameter may move by the learning rate.
    """

    relative: float
    reason: str
    parameters: float | None = None
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a strategy did in the latest step of one model, counted by the strategy itself.

    Fields:
        named: operators and groups the configuration names, as the user wrote them; a preset's are
            its operators.
        never_fired: those of `named` that no operator inside a region has matched.
        offloaded_bytes: bytes moved to host memory, every storage once.
        chunks: chunk bodies executed.
        plan: what the strategy decided, as JSON values; `None` where it decides nothing.
        unneeded: why nothing had to be done, where that is as it should be.
    """

    named: tuple[str, ...] = ()
    never_fired: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    chunks: int = 0
    plan: dict[str, Any] | None = None
    unneeded: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """What a strategy that plans should know of the step that the model is part of.

    Fields:
        loss: takes what the model returns and `loss_inputs`; its bytes are counted. `None` for the sum of the
            results' elements.
        loss_inputs: what `loss` takes behind the results.
        reserved_bytes: held by others at any moment, and counted as activations.
        enclose: puts around a model, in place, what will stand around it, such as regions of activation
            checkpointing, for example inputs, and returns what is called instead of the model.
        device: on which it runs; `None` for that of the example inputs.
        autocast: makes the scope in which the model and the loss run.
        computes_in: the dtype that FSDP will give parameters in use and inputs of units; `None` for theirs.
        units: FQNs of these units.
    """

    loss: Callable[..., Tensor] | None = None
    loss_inputs: tuple[Any, ...] = ()
    reserved_bytes: int = 0
    enclose: Callable[[nn.Module, tuple[Any, ...]], Callable[..., Any]] | None = None
    device: torch.device | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    computes_in: torch.dtype | None = None
    units: tuple[str, ...] = ()


class CallSite(Protocol):
    """A model as a training loop calls it, with a strategy around the call and the model untouched."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model."""

    def observe(self) -> Observation:
        """Return what the latest step showed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A transformation of a model that must not change its mathematics.

    Subclasses are frozen dataclasses; their fields are their configuration, refused in
    `__post_init__` when out of range. A strategy holds no state: applying it to several models
    in one process is applying it to each of them.

    Attributes:
        tolerance: `None` where results are bitwise equal to the plain model's.
        reduced_tolerance: in half precision, where it is another.
        step_tolerance: of one step in fp32, of strategies that are proven by one in every precision.
        reads_parameters: whether `apply` needs the shapes of parameters, which FSDP1 flattens.
        views: what `view` can show of the strategy.
    """

    tolerance: ClassVar[Tolerance | None] = None
    reduced_tolerance: ClassVar[Tolerance | None] = None
    step_tolerance: ClassVar[Tolerance | None] = None
    reads_parameters: ClassVar[bool] = False
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

    def for_step(self, step: PlannedStep) -> Strategy:  # noqa: ARG002 (the default asks for nothing of it)
        """Return the strategy for the training step that the model is part of."""
        return self

    def call_site(self, model: nn.Module) -> CallSite:  # noqa: ARG002 (the default refuses every model)
        """Return what a training loop calls instead of `model`, which stays as it is.

        Raises:
            StrategyError: the strategy does not stand around calls, or not around this model.
        """
        raise StrategyError("wrap_order", f"call_site does not suit {type(self).__name__}; use inside_fsdp")

    def check_units(self, model: nn.Module, units: Collection[str]) -> None:
        """Refuse to be applied to `model`, which carries the strategy, where FSDP will shard these modules.

        Args:
            model: what `apply` returned.
            units: plain FQNs of the modules that will be FSDP units.

        Raises:
            StrategyError: the strategy does not suit such units.
        """

    def view(self, name: str, model: nn.Module, sample: tuple[Any, ...]) -> str:
        """Return what a person should see of the strategy on a plain `model`, which it is applied to.

        Args:
            name: one of `views`.
            model: meta-device modules are enough.
            sample: example positional inputs.

        Raises:
            StrategyError: the model is unsuitable.
        """
        raise NotImplementedError

    def observe(self, model: nn.Module) -> Observation:  # noqa: ARG002 (the default has nothing to look at)
        """Return what the latest training step of `model` showed."""
        return Observation()


def check_simple_fields(group: str, strategy: Strategy) -> None:
    """Refuse a value whose type is not the declared one, in fields of `bool`, `int`, `str` and `None`.

    Args:
        group: the configuration group that the message names, `ac`.
        strategy: the strategy to look at; its other fields are its own business.

    Raises:
        StrategyError: naming the first such field; a `bool` is no `int`.
    """
    hints = get_type_hints(type(strategy))
    for field in fields(strategy):
        hint = hints[field.name]
        accepted = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        value = getattr(strategy, field.name)
        if set(accepted) <= _SIMPLE and type(value) not in accepted:
            names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in accepted)
            raise StrategyError(f"{group}.{field.name}", f"must be {names}, got {value!r}")
