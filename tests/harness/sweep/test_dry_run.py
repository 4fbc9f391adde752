from __future__ import annotations

from pathlib import Path

import pytest

from harness.command_line.schema import experiment_fields, materialise
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.launchers.task import Point
from harness.records.claims import claim, holding, new_submission, write_submission
from harness.records.store import Store, trial_id
from harness.sweep.dry_run import outline
from tests.harness.composing import composed
from tests.harness.records_fixture import STARTED


def point(*overrides: str) -> Point:
    experiment = materialise(experiment_fields(composed(["model=mlp", *overrides])))
    resolved = experiment.to_dict()
    return Point(trial_id=trial_id(resolved), resolved=resolved, experiment=experiment, refusal=None, yaml="")


def refused(*overrides: str) -> Point:
    made = point(*overrides)
    refusal = ConfigError("mesh", "no")
    return Point(
        trial_id=made.trial_id, resolved=made.resolved, experiment=None, refusal=refusal, yaml=made.yaml
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sweep")


def test_every_point_says_what_would_become_of_it(store: Store) -> None:
    points = [point("ac=none"), point("ac=full"), point("ac=full"), refused("ac=nested")]

    def is_done(experiment: Experiment) -> bool:
        return trial_id(experiment.to_dict()) == points[0].trial_id

    assert outline(points, store, is_done).splitlines() == [
        f"{points[0].trial_id}  done       none on single, mlp",
        f"{points[1].trial_id}  to run     full on single, mlp",
        f"{points[3].trial_id}  refused    nested on single, mlp: mesh: no",
        "4 points: 1 to run, 1 done, 1 refused, 1 duplicates; nothing has run",
    ]
    assert not store.root.exists()


def test_what_another_command_runs_is_elsewhere(store: Store) -> None:
    only, submission = point("ac=full"), new_submission("driven", STARTED)
    write_submission(store, submission)
    claim(store, [only.trial_id], submission.id)
    with holding(store, submission.id):
        assert "  elsewhere  full on" in outline([only], store, lambda _: False)
    assert "  to run     full on" in outline([only], store, lambda _: False)
