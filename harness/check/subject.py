"""A model of the caller's as the meters train it: plain, or with the variant on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.check.micro_batches import passes_of
from harness.check.plain_names import PlainNames
from harness.errors import ConfigError
from harness.models.base import Batch
from harness.trial.checkpoint_errors import explained
from strategies import Observation
from strategies.estimate.tensors import tensors_held_by

LEARNING_RATE = 1e-3
_EPSILON = 1e-6  # above the smallest half-precision number, so that no update divides by zero


class PassError(Exception):
    """A pass of one of the two models raised.

    Fields:
        phase: `forward`, `backward` or `update`.
        error: what it raised, with the block where a recomputation did.
        is_variant: the variant's pass, not the plain model's.
    """

    def __init__(self, phase: str, error: Exception, *, is_variant: bool) -> None:
        super().__init__(phase, error)
        self.phase = phase
        self.error = error
        self.is_variant = is_variant


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One made model with its optimizer.

    Fields:
        model: what holds parameters; the module that the variant returned.
        call: what a step calls.
        optimizer: optimizer of the parameters.
        blocks: modules that a sentence names.
        checkpointed: modules that the variant was seen to recompute.
        loss_fn: function of the outputs.
        names: names of the plain model for those of `model`.
        observe: returns what the strategy counted in the latest step.
        is_variant: it carries the variant.
        between: called with the model's call between forward and backward; the passes of all micro-batches
            are then in flight at once. `None`: each is followed by its backward.
        compiled: `None`: what a variant compiles is measured as it runs, without its graphs.
    """

    model: nn.Module
    call: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    blocks: Mapping[str, nn.Module]
    checkpointed: Mapping[str, nn.Module]
    loss_fn: Callable[[Any], Any]
    names: PlainNames
    observe: Callable[[], Observation]
    is_variant: bool
    between: Callable[[Subject], None] | None = None
    compiled: None = None
    _in_flight: list[Tensor] = field(default_factory=list)

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return what the model returns, a list of it for several micro-batches, and the sum of the losses.

        Raises:
            PassError: the model or its loss raised.
            ConfigError: the loss is no scalar that backward can start from.
        """
        outputs: list[Any] = []
        losses: list[Tensor] = []
        self._in_flight.clear()
        for inputs, keywords in passes_of(batch):
            if self._in_flight and self.between is None:
                self._backward(self._in_flight.pop())
                losses[-1] = losses[-1].detach()
            output, loss = self._pass(inputs, keywords)
            outputs.append(output)
            losses.append(loss)
            self._in_flight.append(loss)
        if len(outputs) == 1:
            return outputs[0], losses[0]
        return outputs, torch.stack([loss.reshape(()) for loss in losses]).sum()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of what is in flight, first come first served.

        Args:
            loss: what `forward` returned; the losses that it sums are known.

        Raises:
            PassError: backward raised.
        """
        del loss
        if self.between is not None:
            with self._told("forward"):
                self.between(self)
        while self._in_flight:
            self._backward(self._in_flight.pop(0))

    def update(self) -> None:
        """Take one optimizer step.

        Raises:
            PassError: the optimizer raised.
        """
        with self._told("update"):
            self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def with_parts(
        self, *, blocks: Mapping[str, nn.Module] | None = None, checkpointed: tuple[str, ...] = ()
    ) -> Subject:
        """Return the same model, of which others are named as blocks and as recomputed."""
        modules = self.names.modules
        return dataclasses.replace(
            self,
            blocks=self.blocks if blocks is None else blocks,
            checkpointed={fqn: modules[fqn] for fqn in checkpointed if fqn in modules},
        )

    def _pass(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Tensor]:
        with self._told("forward"):
            outputs = self.call(*inputs, **keywords)
            loss = self.loss_fn(outputs)
        return outputs, _scalar(loss, is_variant=self.is_variant)

    @contextmanager
    def _told(self, phase: str) -> Iterator[None]:
        """Say of which model and phase an error is."""
        try:
            yield
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise PassError(phase, error, is_variant=self.is_variant) from error

    def _backward(self, loss: Tensor) -> None:
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            told = explained(error, loss, self.model)
            raise PassError("backward", told or error, is_variant=self.is_variant) from error
        except Exception as error:
            raise PassError("backward", error, is_variant=self.is_variant) from error


def default_loss(outputs: Any) -> Tensor:
    """Return the `loss` among outputs, or else the sum of the means of their floating-point tensors.

    Raises:
        ConfigError: there is neither.
    """
    given = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(given, Tensor):
        return given
    floating = [each for each in tensors_held_by(outputs) if each.is_floating_point() and each.numel()]
    if not floating:
        problem = (
            f"is needed: outputs are {type(outputs).__name__}, without `loss` and floating-point tensors"
        )
        raise ConfigError("loss_fn", problem)
    total = floating[0].mean()
    for tensor in floating[1:]:
        total = total + tensor.mean()
    return total


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, whose steps are of one size whatever the loss; SGD where gradients are sparse."""
    parameters = list(model.parameters())  # a model may unfreeze some later
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=_EPSILON)


def _scalar(loss: Any, *, is_variant: bool) -> Tensor:
    """Return `loss`.

    Raises:
        ConfigError: it is no scalar of the plain model.
        PassError: backward cannot start from the variant's, although it can from the plain model's.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"a {tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError("loss_fn", f"must return a real scalar tensor, got {got}")
    if loss.requires_grad:
        return loss
    if is_variant:
        lost = RuntimeError("the loss depends on no parameter that requires a gradient")
        raise PassError("forward", lost, is_variant=True)
    raise ConfigError("loss_fn", "the loss depends on no parameter that requires a gradient")
