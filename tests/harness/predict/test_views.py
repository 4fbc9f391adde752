"""Views of trials that nobody runs: a plan of a step is that of the trial."""

from __future__ import annotations

from pathlib import Path

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
    given = planned_on_fake_rank(experiment, "cpu", tmp_path / "plan.json")
    text = view_of(experiment, "plan")
    assert text == Plan.load(tmp_path / "plan.json").describe() == view_of(given, "plan")
    assert text.startswith("budget ")
    assert "operators run again for" in text
    assert "\nRULES = [\n" in view_of(given, "file")
