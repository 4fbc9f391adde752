"""Rehearsals: a pass of a model on tensors without memory, which says what it will hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from strategies.chunking.scopes import ScopeScheduler, put_all
from strategies.fx.program import shadowed
from strategies.fx.shadow import Shadow
from strategies.plan.meter import LiveBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """What a training pass holds beside the model.

    Fields:
        loss: takes the model's results and `loss_inputs`, its bytes are counted; `None` for the sum of the
            results' elements. It is not chunked; a loss inside the model is.
        loss_inputs: what `loss` takes behind the results.
        reserved_bytes: held by others at any moment, and counted as activations.
    """

    loss: Callable[..., Tensor] | None = None
    loss_inputs: tuple[Any, ...] = ()
    reserved_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """One pass of a model.

    Fields:
        model: plain, with or without memory.
        sample: positional inputs.
        device: that the tensors say they are on.
        step: what else the pass holds.
        training: whether it has a backward.
    """

    model: nn.Module
    sample: tuple[Any, ...]
    device: torch.device
    step: PlannedStep
    training: bool

    def peak_bytes(self, schedulers: Mapping[str, ScopeScheduler]) -> int:
        """Return the highest total of the storages that the pass makes, gradients of parameters left out."""
        shadow = Shadow.of(self.model).on(self.device)
        assert shadow.mode is not None
        inputs, targets = shadowed(shadow, (self.sample, self.step.loss_inputs), self.device)
        standing = [*shadow.model.parameters(), *shadow.model.buffers()]
        standing += [leaf for leaf in tree_flatten((inputs, targets))[0] if isinstance(leaf, Tensor)]
        put_all(shadow.model, schedulers)
        meter = LiveBytes(standing)
        with torch.set_grad_enabled(self.training), shadow.mode, meter:
            if self.training:
                gradients = _train_once(shadow.model, inputs, self.step.loss, targets)
                return meter.peak_bytes(gradients) + self.step.reserved_bytes
            shadow.model(*inputs)
            return meter.peak_bytes()


def _train_once(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[..., Tensor] | None,
    loss_inputs: tuple[Any, ...],
) -> list[Tensor]:
    """Run forward and backward of `model`, and return the gradients of its parameters.

    Args:
        model: with tensors of any kind.
        inputs: positional.
        loss: of what the model returns, and of `loss_inputs`; `None` for the sum of the results' elements.
        loss_inputs: what `loss` takes behind the results.
    """
    outputs = model(*inputs)
    if loss is not None:
        total = loss(outputs, *loss_inputs)
        del outputs
        total.backward()  # type: ignore[no-untyped-call]
    else:
        results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        del outputs
        gradients = [result.detach().new_ones(()).expand(result.shape) for result in results]
        torch.autograd.backward(results, gradients)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return found
