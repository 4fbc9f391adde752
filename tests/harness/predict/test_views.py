"""Views of trials that nobody runs: a plan of a step is that of the trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.predict.fake_rank import planned_on_fake_rank
from harness.predict.views import view_of
from strategies.budget.plan import Plan
from tests.harness.composing import experiment_of

_SMALL = (
    "model=gpt_nano data=synthetic batch_size=8 sequence_length=64 "
    "model.n_layers=2 model.width=32 model.hidden_width=64 ac=budget"
)


def test_the_plan_of_a_trial_is_shown_and_can_be_given(tmp_path: Path) -> None:
    experiment = experiment_of(f"{_SMALL} ac.fraction=0.8")
    given = planned_on_fake_rank(experiment, tmp_path / "plan.json")
    text = view_of(experiment, "plan")
    assert text == Plan.load(tmp_path / "plan.json").describe() == view_of(given, "plan")
    assert text.startswith("budget ")
    assert "operators run again for" in text
    assert "\nRULES = [\n" in view_of(given, "file")


@pytest.mark.parametrize(
    ("mesh", "heads"),
    [
        pytest.param(
            "mesh=cp2 mesh.cp_method=ring",
            ["rank 0, part 0 of 2 in the ring", "rank 1, part 1 of 2 in the ring"],
            id="a ring",
        ),
        pytest.param(
            "mesh=cp2 mesh.cp_method=ring mesh.dp_replicate=2",
            [
                "rank 0, part 0 of 2 in the ring, which 2 ranks share",
                "rank 1, part 1 of 2 in the ring, which 2 ranks share",
            ],
            id="two rings",
        ),
    ],
)
def test_plans_of_unlike_ranks_say_whose_they_are(mesh: str, heads: list[str]) -> None:
    experiment = experiment_of(f"{_SMALL} ac.fraction=0.9 model=llama_nano model.n_layers=1 {mesh}")
    shown = view_of(experiment, "plan").splitlines()
    assert [line for line in shown if line.startswith("rank ")] == heads
