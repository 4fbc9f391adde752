"""A model that a program hands over as functions, as `assert_neutral` takes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.check.given_batches import given_batches
from harness.check.subject import default_loss
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.models.base import Batch, ModelSpec
from harness.models.parts import made_model
from harness.models.parts.given_inputs import tensors_of

_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    make: Callable[[], nn.Module]
    batch: Batch
    loss_fn: Callable[[Any], Any] | None


_given: dict[str, _Given] = {}
"""What programs have handed over, as long as they ask about it: a specification is a value, and has a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcessSpec(ModelSpec):
    """A model of the calling program, trained on the one batch that it gives.

    Fields:
        key: which of the models that were handed over.
        rows: samples of the batch; `None` for as many as it has.
    """

    key: str
    rows: int | None = None

    def build(self) -> nn.Module:
        """Return a fresh model, in training mode as a loop has it.

        Raises:
            ConfigError: `make` returns something else.
        """
        made = _given[self.key].make()
        if not isinstance(made, nn.Module):
            raise ConfigError("make", f"must return an nn.Module, got {type(made).__name__}")
        made_model.train(made)
        return made

    def loss(self, outputs: Any, batch: Batch) -> Tensor:  # noqa: ARG002 (a loss of the caller's reads outputs)
        """Return the scalar of `loss_fn`, or the usual one of outputs."""
        loss_fn = _given[self.key].loss_fn
        found: Tensor = default_loss(outputs) if loss_fn is None else loss_fn(outputs)
        return found

    def fixed_batch(self, seed: int = 0, device: str = "cpu") -> Batch | None:  # noqa: ARG002 (it is given)
        """Return the batch with `rows` samples; one with other rows than were given has no values."""
        batch = _given[self.key].batch
        count = rows_of(batch)
        if device == "meta" or (self.rows is not None and self.rows != count):
            return batch.changed(self._empty)
        return batch

    def usual_dtype(self) -> str:
        """Return `own`: the model stays as it is made."""
        return "own"

    def flops_per_sample(self, sequence_length: int) -> int | None:  # noqa: ARG002 (nobody has said)
        """Return that it is unknown."""
        return None

    def may_drop_out(self) -> bool:
        """Return true: a model may drop out whatever it likes."""
        return True

    def _empty(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory, of `rows` samples where that is asked for."""
        shape = tensor.shape if self.rows is None else (self.rows, *tensor.shape[1:])
        made = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)


def rows_of(batch: Batch) -> int | None:
    """Return the samples of a batch: what all its tensors have in front; `None` where they differ."""
    counts = {tensor.size(0) if tensor.dim() else None for _, tensor in tensors_of(batch)}
    return counts.pop() if len(counts) == 1 else None


@contextmanager
def handed_over(
    make: Callable[[], nn.Module], batch: Any, loss_fn: Callable[[Any], Any] | None
) -> Iterator[tuple[InProcessSpec, int | None]]:
    """Give the specification of a model, and the samples of its batch, as long as the scope lasts.

    Raises:
        ConfigError: an argument is of another kind than documented.
    """
    if isinstance(make, nn.Module) or not callable(make):
        got = f"an instance of {type(make).__name__}"
        raise ConfigError("make", f"must be a function that returns a fresh model, got {got}")
    parts = given_batches(batch)
    if len(parts) != 1:
        raise ConfigError("batch", f"must be one batch, got {len(parts)} micro-batches; give one of them")
    given = parts[0].changed(lambda tensor: tensor.detach().cpu().requires_grad_(tensor.requires_grad))
    key = f"{getattr(make, '__name__', type(make).__name__)} {next(_NUMBERS)}"
    _given[key] = _Given(make=make, batch=given, loss_fn=loss_fn)
    name = getattr(make, "__name__", type(make).__name__)
    try:
        rows = rows_of(given)
        yield InProcessSpec(name=name, layers_fqn="", dropout=0.0, key=key, rows=rows), rows
    finally:
        del _given[key]


def with_rows(experiment: Experiment, size: int) -> Experiment:
    """Return a step with a batch of another size."""
    model = experiment.model
    resized = replace(model, rows=size) if isinstance(model, InProcessSpec) else model
    return replace(experiment, model=resized, batch_size=size)
