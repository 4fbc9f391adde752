"""The proof of a plan: each distinct scope runs as a program and as it is, on a part of the sample.

Planning needs no data. Where the model or its sample has none, programs are proven with the inputs of their
first call instead, before they stand in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.base import LossInputs, PlannedStep
from strategies.chunk.running.batch_loop import BatchLoop
from strategies.chunk.running.chunked_forward import Loss, Scheduler, install, prove, uninstall
from strategies.chunk.running.proof import Proofs, UnprovenError, first_samples, has_values, without_hooks
from strategies.regions.rewind import noted_state


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanProof:
    """The pass that proves a plan. `step`: everything else in the training step."""

    model: nn.Module
    sample: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    step: PlannedStep
    training: bool

    def of(
        self,
        schedulers: Mapping[str, Scheduler],
        opaque: Mapping[str, str],
        *,
        loss: Loss | None,
        batch: int | None,
    ) -> Proofs:
        """Return what is proven of programs under schedulers: nothing where there are no values.

        The model and all generators of random numbers are left as they were.

        Args:
            schedulers: what decides for each scope, by FQN.
            opaque: FQNs of modules that run as they are, with the reason.
            loss: what the model goes on to.
            batch: samples of a chunk of the loop over the batch.

        Raises:
            UnprovenError: a program does not do what its forward does.
        """
        proofs = Proofs()
        targets = self.step.loss_inputs if loss is not None else ()
        every = self.sample, dict(self.kwargs), targets
        tensors = [leaf for leaf in tree_leaves(every) if isinstance(leaf, Tensor)]
        if not schedulers or not has_values(self.model, tensors):
            return proofs
        loop = None if batch is None else BatchLoop(length=batch)
        with _left_as_it_was(self.model), without_hooks(self.model, but=None):
            install(self.model, schedulers, opaque, loss=loss, batch=loop, proofs=proofs)
            if not self._runs(first_samples(every), with_loss=loss is not None):
                self._runs(every, with_loss=loss is not None)
        return proofs

    def _runs(self, every: tuple[Any, ...], *, with_loss: bool) -> bool:
        """Run the model, which proves each program in its first call; return whether that is possible."""
        sample, kwargs, targets = every
        inputs = (*sample, LossInputs(targets)) if with_loss else sample
        try:
            with (
                torch.inference_mode(mode=False),
                torch.set_grad_enabled(self.training),
                self.step.autocast(),
            ):
                prove(self.model, inputs, kwargs)
        except UnprovenError:
            raise
        except Exception:  # noqa: BLE001 (what is no defect of the program is said at the call)
            return False
        return True


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    put_back = noted_state(model)
    try:
        yield
    finally:
        uninstall(model)
        put_back()
