"""What `assert_neutral` says of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.trials import experiments
from harness.check import NotNeutral, assert_neutral
from harness.check.not_neutral import Neutrality
from harness.trial.batches import batches
from harness.trial.plain_model import PlainModel
from tests.gallery.case import Case

FACTORIES = "tests.gallery.users.factories"


class WithLoss(nn.Module):
    """A model with its loss, as `transformers` has it."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss_of = loss

    def forward(self, *inputs: Any, **keywords: Any) -> dict[str, Any]:
        """Return the loss, and what the model returns."""
        outputs = self.model(*inputs, **keywords)
        return {"loss": self.loss_of(outputs), "outputs": outputs}


def checked(case: Case, *, steps: int = 2) -> Neutrality:
    """Return what `assert_neutral` finds after so many optimizer steps."""
    assert not isinstance(case.variant, tuple), "options are those of a command"
    return _found(case.make, case.batch, case.variant, steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What is said of a user's case.

    Fields:
        verdict: of the check or of the record; `refused` where none is reached.
        sentence: all that is said.
        late_reads: names that the recomputation reads late, as the check lists them.
    """

    verdict: str
    sentence: str
    late_reads: tuple[str, ...] = ()


def said_of_users(name: str, case: Case) -> Said:
    """Return what `assert_neutral` says of a user's case, or why the command refuses its options."""
    assert isinstance(case.variant, tuple)
    points = (
        *("model=python", f"model.factory={FACTORIES}:{name.partition(' ')[0]}"),
        *(f"model.layers_fqn={case.layers_fqn}", "mesh.device=cpu"),
    )
    try:
        (experiment,) = experiments([[*points, *case.variant]])
        batch = batches(experiment, torch.device("cpu"), 0)(0)

        def make() -> WithLoss:
            plain = PlainModel.of(experiment, torch.device("cpu"))
            return WithLoss(plain.model, lambda outputs: plain.loss(outputs, batch))

        def variant(model: WithLoss) -> WithLoss:
            model.model = experiment.ac.apply(model.model, batch.inputs)
            return model

        # a loss may hold its targets: one example, or none
        inputs: Any = batch.inputs if not batch.keywords else dict(batch.keywords)
        found = _found(make, inputs, variant, experiment.protocol.parity_steps)
    except ValueError as refusal:
        return Said(verdict="refused", sentence=str(refusal))
    return Said(verdict=found.verdict, sentence=str(found), late_reads=tuple(found.late_reads))


def _found(make: Callable[[], Any], batch: Any, variant: Any, steps: int) -> Neutrality:
    try:
        return assert_neutral(make, batch, variant, steps=steps)
    except NotNeutral as failure:
        return failure.found
