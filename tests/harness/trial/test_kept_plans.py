"""A prediction and its trial search for one plan; what the folder of the sweep has is found there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.experiment.experiment import Experiment
from harness.predict.prediction import predicted_step
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.kept_plans import plans_kept_in
from harness.trial.plan_budget import PLAN_FILE, with_plan
from strategies.budget.kept import Answers
from strategies.budget.planning.known_plans import WayToPlan
from strategies.chunk.base import FromPlan
from strategies.chunk.planning import plan_json
from strategies.chunk.planning.chunk_plan import ChunkPlan, ChunkPlanner
from tests.harness.composing import experiment_of
from tests.parity import cases

_CPU = torch.device("cpu")
_TINY = "model.n_layers=2 model.width=16 model.hidden_width=32 batch_size=4 data=synthetic optimizer=sgd"


def _case(fraction: float = 0.9, options: str = "") -> Experiment:
    return experiment_of(f"model=mlp {_TINY} ac=budget ac.fraction={fraction} {options}")


def _planned(case: Experiment, folder: Path) -> str:
    """Return the plan file of a trial in a sweep's folder."""
    trial_dir = folder / "trial"
    trial_dir.mkdir(exist_ok=True)
    batch = batches(case, _CPU, 0)
    with plans_kept_in(folder, case, _CPU):
        make = partial(cases.assembled, sample=batch(0))
        with_plan(case, make, batch, trial_dir / PLAN_FILE, device=_CPU)
    return (trial_dir / PLAN_FILE).read_text()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each search of options."""
    found: list[None] = []
    search: Callable[[WayToPlan], Iterator[object]] = WayToPlan.ways

    def counted(way: WayToPlan) -> Iterator[object]:
        found.append(None)
        return search(way)

    monkeypatch.setattr(WayToPlan, "ways", counted)
    return found


def test_a_trial_has_the_plan_of_its_prediction(tmp_path: Path, searches: list[None]) -> None:
    kept, alone = tmp_path / "kept", tmp_path / "alone"
    kept.mkdir()
    alone.mkdir()
    assert predicted_step(_case(), folder=kept) is not None
    assert len(searches) == 1
    found = _planned(_case(), kept)
    assert len(searches) == 1
    assert found == _planned(_case(), alone)
    assert len(searches) == 2


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(_case(0.95), id="another budget"),
        pytest.param(_case(options="batch_size=8"), id="another step"),
        pytest.param(_case(options="ac.objective=time"), id="another objective"),
    ],
)
def test_another_plan_is_searched_for(tmp_path: Path, searches: list[None], other: Experiment) -> None:
    _planned(_case(), tmp_path)
    _planned(other, tmp_path)
    assert len(searches) == 2


def test_a_plan_of_the_same_step_is_found_whatever_else_differs(tmp_path: Path, searches: list[None]) -> None:
    _planned(_case(), tmp_path)
    _planned(replace(_case(), seed=1), tmp_path)
    assert len(searches) == 1


@pytest.fixture
def plans_of_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The budget of each plan of chunks that is sought."""
    found: list[int | None] = []
    plan = ChunkPlanner.plan

    def counted(planner: ChunkPlanner, budget_bytes: int | None) -> ChunkPlan:
        found.append(budget_bytes)
        return plan(planner, budget_bytes)

    monkeypatch.setattr(ChunkPlanner, "plan", counted)
    return found


def _chunked(options: str = "") -> Experiment:
    """Return an experiment that fits its budget as it is, which planning says at once."""
    return experiment_of(f"model=mlp {_TINY} chunk=budget chunk.fraction=1 {options}")


_CHUNKED = _chunked()  # what it is checked for, outside of tests, plans it, too


def _chunk(case: Experiment, folder: Path) -> None:
    """Make the model of a trial in a sweep's folder."""
    with plans_kept_in(folder, case, _CPU):
        assemble(case, _CPU, None, batches(case, _CPU, 0)(0))


def test_a_trial_has_the_chunks_of_its_prediction_whatever_its_seed(
    tmp_path: Path, plans_of_chunks: list[int | None]
) -> None:
    assert predicted_step(_CHUNKED, folder=tmp_path) is not None
    _chunk(replace(_CHUNKED, seed=1), tmp_path)
    assert len(plans_of_chunks) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(_chunked("batch_size=8"), id="a larger step"),
        pytest.param(_chunked("ac=full"), id="a step with recomputation"),
    ],
)
def test_chunks_of_another_step_are_sought(
    tmp_path: Path, plans_of_chunks: list[int | None], other: Experiment
) -> None:
    _chunk(_CHUNKED, tmp_path)
    _chunk(other, tmp_path)
    assert len(plans_of_chunks) == 2


def test_chunks_beside_the_users_code_are_not_kept(tmp_path: Path) -> None:
    code, folder = tmp_path / "mine.py", tmp_path / "kept"
    code.write_text("def apply(model):\n    return model\n")
    folder.mkdir()
    assert predicted_step(_chunked(f"ac=file ac.path={code}"), folder=folder) is not None
    assert list(folder.iterdir()) == []


def test_chunks_of_a_file_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    kept = tmp_path / "kept"
    kept.mkdir()
    case = experiment_of(f"model=mlp {_TINY} ac=budget ac.fraction=0.9 chunk=budget")
    chunks = plan_json.plan_to_json(ChunkPlan.nothing(1, 1, training=True))
    file.write_text(json.dumps({"chunk": chunks}))
    _chunk(replace(case.plain(), chunk=FromPlan(plan_file=str(file))), kept)
    assert list(kept.iterdir()) == []


def test_where_no_folder_is_given_nothing_is_kept(searches: list[None]) -> None:
    for _ in range(2):
        with plans_kept_in(None, _case(), _CPU):
            answers = Answers("question")
            answers.write("name", 1)
            assert answers.read("name") is None
    assert not searches


def _answer(folder: Path, *, write: bool) -> object:
    with plans_kept_in(folder, _case(), _CPU):
        answers = Answers("question")
        if write:
            answers.write("name", [1])
        return answers.read("name")


def test_what_is_found_in_another_environment_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _answer(tmp_path, write=True) == [1]
    assert _answer(tmp_path, write=False) == [1]
    monkeypatch.setattr("harness.trial.kept_plans.environment_id", lambda _: "other")
    assert _answer(tmp_path, write=False) is None


def test_what_is_torn_is_unknown(tmp_path: Path) -> None:
    _answer(tmp_path, write=True)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-1])
    assert _answer(tmp_path, write=False) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    assert _answer(tmp_path / "missing", write=True) is None
