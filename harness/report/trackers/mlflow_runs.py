"""The publisher of `tracker=mlflow`: `python -m harness.report.trackers.mlflow_runs <sweep folder> ...`.

Runs go to the server that `MLFLOW_TRACKING_URI` names; without one they stay in `outputs/<name>/mlflow`, and
`mlflow ui --backend-store-uri sqlite:///outputs/<name>/mlflow/mlflow.db` opens them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from harness.report.trackers.tracked_run import TrackedRun, published_by

_TRIAL = "acbench.trial_id"
_MOST_PARAMS, _MOST_METRICS = 100, 1000  # of a batch, by MLflow's REST API
_MOST_CHARACTERS = 6000  # of the value of a parameter, as above


def writer(folder: Path, project: str) -> Callable[[TrackedRun], Path]:
    """Return what keeps a run in an experiment named `project`, in place of an earlier one of the trial."""
    server = os.environ.get("MLFLOW_TRACKING_URI")
    client = MlflowClient(server or f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(project)
    where = {} if server else {"artifact_location": (folder / "artifacts").as_uri()}
    experiment_id = (
        client.create_experiment(project, **where) if experiment is None else experiment.experiment_id
    )

    def write(run: TrackedRun) -> Path:
        for earlier in client.search_runs([experiment_id], f"tags.`{_TRIAL}` = '{run.trial_id}'"):
            client.delete_run(earlier.info.run_id)
        status, verdict = run.tags
        tags = {_TRIAL: run.trial_id, "sweep": run.group, "status": status, "verdict": verdict}
        made = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        params = (Param(name, str(value)[:_MOST_CHARACTERS]) for name, value in run.config.items())
        while some := list(islice(params, _MOST_PARAMS)):
            client.log_batch(made, params=some)
        metrics = _metrics(run)
        while numbers := list(islice(metrics, _MOST_METRICS)):
            client.log_batch(made, metrics=numbers)
        words = (RunTag(key, value) for key, value in run.summary.items() if isinstance(value, str) and value)
        while tagged := list(islice(words, _MOST_PARAMS)):
            client.log_batch(made, tags=tagged)
        for title, (headings, rows) in run.tables.items():
            columns = {heading: [row[place] for row in rows] for place, heading in enumerate(headings)}
            client.log_dict(made, columns, f"{title}.json")
        client.log_artifact(made, str(run.record_file))
        client.set_terminated(made)
        return folder

    return write


def _metrics(run: TrackedRun) -> Iterator[Metric]:
    """Yield the numbers of a run: those of its history with their steps, then those of its summary."""
    for name, value, step in run.stepped():
        yield Metric(name, value, 0, step)
    for name, value in run.summary.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield Metric(name, float(value), 0, 0)


if __name__ == "__main__":
    sys.exit(published_by("mlflow", writer))
