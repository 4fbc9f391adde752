"""What the chunk variants share: a plan for training under a budget, put on a model, shown and observed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from strategies.base import Observation, Strategy, Tolerance
from strategies.blocks import plain_named_modules, unwrapped
from strategies.chunking.forward import chunked_forwards
from strategies.chunking.plan import ChunkPlan
from strategies.chunking.show import code_view, memory_view
from strategies.errors import StrategyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunking(Strategy):
    """A variant that runs parts of a model in chunks; a model in training mode is planned with its backward.

    Fields of subclasses say how many bytes the activations may have.
    """

    tolerance: ClassVar[Tolerance | None] = Tolerance(
        relative=1e-3,
        reason="gradients of weights are summed chunk by chunk, and matrix kernels round by the number of rows",
    )
    reads_parameters: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ("chunks", "memory")

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:
        """Return `model`, planned and changed in place.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            StrategyError: the model is unsuitable, or chunked already.
        """
        return self.apply_with(model, sample, None, ())

    def for_loss(self, loss: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Strategy:
        """Return the strategy with a plan that counts the bytes of `loss`."""
        return _ForLoss(chunking=self, loss=loss, loss_inputs=inputs)

    def plan(
        self,
        model: nn.Module,
        sample: tuple[Any, ...],
        loss: Callable[..., Tensor] | None,
        loss_inputs: tuple[Any, ...],
    ) -> ChunkPlan:
        """Return the plan of `model`.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            StrategyError: the model is unsuitable, or chunked already.
        """
        raise NotImplementedError

    def apply_with(
        self,
        model: nn.Module,
        sample: tuple[Any, ...],
        loss: Callable[..., Tensor] | None,
        loss_inputs: tuple[Any, ...],
    ) -> nn.Module:
        """Return `model` with a plan that counts the bytes of `loss`, `None` for no loss of its own."""
        if not sample:
            raise StrategyError("chunk", "needs example inputs to plan with; give them as the sample")
        plan = self.plan(model, sample, loss, loss_inputs)
        plan.apply(model)
        return model

    def check_units(self, model: nn.Module, units: Collection[str]) -> None:
        """Refuse an FSDP unit inside a forward that is one program, which would not call it.

        Raises:
            StrategyError: naming the unit.
        """
        scopes = [fqn for fqn in chunked_forwards(model) if fqn]
        for unit in units:
            if scopes and unit not in scopes:
                raise StrategyError("chunk", f"{unit!r} is an FSDP unit, and no block with a forward of its own")

    def view(self, name: str, model: nn.Module, sample: tuple[Any, ...]) -> str:
        """Return the code with its loops (`chunks`), or the bytes operator by operator (`memory`)."""
        return _view(self, name, model, sample, None, ())

    def observe(self, model: nn.Module) -> Observation:
        """Return the chunk bodies that ran in the latest forward, and the plan."""
        forwards = chunked_forwards(model)
        plan = next((forward.plan for forward in forwards.values() if forward.plan is not None), None)
        return Observation(
            chunks=sum(forward.chunks() for forward in forwards.values()),
            plan=None if plan is None else {"chunk": plan},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForLoss(Strategy):
    chunking: Chunking
    loss: Callable[..., Tensor]
    loss_inputs: tuple[Any, ...]

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:
        return self.chunking.apply_with(model, sample, self.loss, self.loss_inputs)

    def view(self, name: str, model: nn.Module, sample: tuple[Any, ...]) -> str:
        return _view(self.chunking, name, model, sample, self.loss, self.loss_inputs)


def _view(
    chunking: Chunking,
    name: str,
    model: nn.Module,
    sample: tuple[Any, ...],
    loss: Callable[..., Tensor] | None,
    loss_inputs: tuple[Any, ...],
) -> str:
    plan = chunking.plan(model, sample, loss, loss_inputs)
    return (code_view if name == "chunks" else memory_view)(plan, model, sample)


def is_trained(model: nn.Module) -> bool:
    """Whether a step of `model` has a backward."""
    trained = any(parameter.requires_grad for _, parameter in _parameters(model))
    return unwrapped(model).training and torch.is_grad_enabled() and trained


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [each for _, module in plain_named_modules(model) for each in module.named_parameters(recurse=False)]
