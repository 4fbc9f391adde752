"""Defects of steps in micro-batches: what each shows with torch alone, and how it ends here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleavedZeroBubble

from harness.check import NotNeutral, assert_neutral
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.models.base import Batch
from harness.records.parity_result import Parity
from harness.trial import assemble as assembly
from harness.trial import pipeline
from strategies.ac.full import Full
from strategies.ac.selective_op import SelectiveOp
from strategies.estimate.patched import replaced
from tests.gallery.entries import STEPS, step_entries
from tests.gallery.parts import rows
from tests.gallery.pipelines.p4_state_that_grows_with_micro_batches import Remembering
from tests.gallery.pipelines.stages import MICROBATCHES, Stage, apart, trained
from tests.parity import cases
from tests.rank_pool import RankPool

ENTRIES = step_entries()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", STEPS)
def test_torch_does_what_the_entry_says(name: str) -> None:
    case = ENTRIES[name].case
    assert case.by_torch() == case.says


@pytest.mark.parametrize(
    ("variant", "forwards"),
    [(Full(layers_fqn="blocks"), 2), (SelectiveOp(layers_fqn="blocks"), 2)],
    ids=["full", "selective_op"],
)
def test_our_regions_recompute_once(variant: Any, forwards: int) -> None:
    _, expected = trained(schedule=ScheduleInterleavedZeroBubble)
    (_, block), gradients = trained(variant, schedule=ScheduleInterleavedZeroBubble)
    assert (block.forwards / MICROBATCHES, apart(gradients, expected)) == (forwards, 0.0)


def test_a_check_finds_state_that_grows_with_micro_batches() -> None:
    with pytest.raises(NotNeutral) as found:
        assert_neutral(partial(Stage, Remembering), [rows(2), rows(3)], Full(layers_fqn="blocks"))
    assert found.value.verdict == ENTRIES["p4_state_that_grows_with_micro_batches"].case.verdict


def _scaling(*args: Any, **options: Any) -> Any:
    return ScheduleGPipe(*args, **options | {"scale_grads": True})


def _proven(rank: int, case: Experiment) -> Parity:
    schedules = {**pipeline._SCHEDULES, "gpipe": _scaling}
    with replaced(pipeline, "_SCHEDULES", schedules):
        return cases.parity(rank, case)


class _Dropping(pipeline.Pipeline):
    """A pipeline that takes all micro-batches of a step but the last."""

    def __init__(self, *args: Any, microbatches: int, **options: Any) -> None:
        super().__init__(*args, microbatches=microbatches - 1, **options)

    def step(self, parts: Sequence[Batch], *others: Any) -> None:
        """Leave the last one out."""
        super().step(parts[:-1], *others)


def _equal_to_twin(parity: Parity) -> bool:
    return all(getattr(parity, each).equal for each in ("outputs", "loss", "gradients", "parameters"))


def _proven_without_last(rank: int, case: Experiment) -> Parity:
    with replaced(assembly, "Pipeline", _Dropping):
        return cases.parity(rank, case)


def _staged(seed: int) -> Experiment:
    """Return a case of two stages; ranks remember the steps of what has the same seed."""
    case = cases.experiment(
        model="llama", mesh=Mesh(pp=2, pp_schedule="gpipe"), variant="full", batch_size=8, sequence_length=8,
        microbatches=4, parity_steps=1, seed=seed,
    )  # fmt: skip
    return replace(case, model=replace(case.model, n_layers=2))  # type: ignore[call-arg]  # of llama


def test_a_last_micro_batch_that_a_pipeline_drops_is_missed_by_the_dense_model_alone(pool2: RankPool) -> None:
    *_, last = pool2.run(_proven_without_last, _staged(seed=1))
    (dense,) = last.chain
    assert _equal_to_twin(last)
    assert dense.first is not None
    assert dense.first.part == "loss"


def test_gradients_scaled_twice_are_not_those_of_the_dense_model(pool2: RankPool) -> None:
    *_, last = pool2.run(_proven, _staged(seed=2))
    (dense,) = last.chain
    assert _equal_to_twin(last)
    assert dense.first is not None
    assert dense.first.part == "gradients"
