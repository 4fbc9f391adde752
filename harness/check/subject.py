"""A model of the caller's as the meters train it: plain, or with the variant on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.check.plain_names import PlainNames
from harness.errors import ConfigError
from harness.measure.trainee import Watcher, forward_and_backward
from harness.models.base import Batch
from harness.trial import checkpoint_errors
from strategies import Observation
from strategies.estimate.tensors import tensors_held_by

LEARNING_RATE = 1e-3
_EPSILON = 1e-6  # above the smallest half-precision number, so that no update divides by zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One made model with its optimizer.

    Fields:
        model: what holds parameters; the module that the variant returned.
        call: what a step calls.
        blocks: modules that a sentence names.
        checkpointed: modules that the variant was seen to recompute.
        loss_fn: function of the outputs.
        names: names of the plain model for those of `model`.
        observe: returns what the strategy counted in the latest step.
        computed: returns the scope in which forward and loss run, such as autocast.
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
    computed: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiled: None = None

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return what the model returns, and the loss.

        Raises:
            ConfigError: the loss is no scalar that backward can start from.
            RuntimeError: the variant's loss depends on nothing to train, although the plain model's does.
        """
        with self.computed():
            outputs = self.call(*batch.inputs, **batch.keywords)
            return outputs, _scalar(self.loss_fn(outputs), is_variant=self.is_variant)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients.

        Raises:
            RuntimeError: a recomputation does not repeat forward; the message names block and operator.
        """
        checkpoint_errors.backward(loss, self.model)

    def step(self, batch: Batch, watcher: Watcher) -> None:
        """Run forward and backward."""
        forward_and_backward(self, batch, watcher)

    def update(self) -> None:
        """Take one optimizer step."""
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


def optimizer_of(model: nn.Module, *, for_one_step: bool = False) -> torch.optim.Optimizer:
    """Return AdamW, whose steps are of one size whatever the loss; SGD where gradients are sparse.

    Args:
        for_one_step: SGD, which has no state to make: no further step shows what a first one has left in it.
    """
    parameters = list(model.parameters())  # a model may unfreeze some later
    if for_one_step or any(getattr(module, "sparse", False) is True for module in model.modules()):
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=_EPSILON)


def _scalar(loss: Any, *, is_variant: bool) -> Tensor:
    """Return `loss`.

    Raises:
        ConfigError: it is no scalar of the plain model, or none to train by.
        RuntimeError: backward cannot start from the variant's, although it can from the plain model's.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"a {tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError("loss_fn", f"must return a real scalar tensor, got {got}")
    if loss.requires_grad or not torch.is_grad_enabled():
        return loss
    problem = "the loss depends on no parameter that requires a gradient"
    raise RuntimeError(problem) if is_variant else ConfigError("loss_fn", problem)
