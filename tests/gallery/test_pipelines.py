"""Defects of steps in micro-batches: what each shows with torch alone, and how it ends here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleavedZeroBubble

from harness.check import NotNeutral, assert_neutral
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.records.parity_result import Parity
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


def test_gradients_scaled_twice_are_not_those_of_the_dense_model(pool2: RankPool) -> None:
    case = cases.experiment(
        model="llama", mesh=Mesh(pp=2, pp_schedule="gpipe"), variant="full", batch_size=8, sequence_length=8,
        microbatches=4, parity_steps=1,
    )  # fmt: skip
    case = replace(case, model=replace(case.model, n_layers=2))  # type: ignore[call-arg]  # of llama
    *_, last = pool2.run(_proven, case)
    (dense,) = last.chain
    found = {each: getattr(last, each).equal for each in ("loss", "gradients", "parameters")}
    assert found == dict.fromkeys(found, True)
    assert dense.first is not None
    assert dense.first.part == "gradients"
