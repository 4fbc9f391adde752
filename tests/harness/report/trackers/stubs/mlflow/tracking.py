from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlflow.entities import Metric, Param, RunTag

_MOST = {"params": 100, "tags": 100, "metrics": 1000}


class MlflowClient:
    def __init__(self, tracking_uri: str) -> None:
        assert tracking_uri.startswith("sqlite:///")
        self._file = Path(tracking_uri.removeprefix("sqlite:///"))
        kept = json.loads(self._file.read_text("utf-8")) if self._file.exists() else {}
        self._runs: dict[str, dict[str, Any]] = kept.get("runs", {})
        self._experiment: dict[str, str] | None = kept.get("experiment")

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        is_known = self._experiment is not None and self._experiment["name"] == name
        return SimpleNamespace(experiment_id="1") if is_known else None

    def create_experiment(self, name: str, artifact_location: str) -> str:
        assert self._experiment is None
        self._experiment = {"name": name, "artifacts": artifact_location}
        return "1"

    def search_runs(self, experiment_ids: list[str], filter_string: str) -> list[SimpleNamespace]:
        assert experiment_ids == ["1"]
        tag, value = (part.strip("`'") for part in filter_string.removeprefix("tags.").split(" = "))
        found = [number for number, run in self._runs.items() if dict(run["tags"]).get(tag) == value]
        return [SimpleNamespace(info=SimpleNamespace(run_id=number)) for number in found]

    def delete_run(self, run_id: str) -> None:
        del self._runs[run_id]

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        assert experiment_id == "1"
        number = f"run{len(self._runs)}"
        self._runs[number] = {
            "name": run_name,
            "tags": [*tags.items()],
            "metrics": [],
            "params": [],
            "files": [],
        }
        return SimpleNamespace(info=SimpleNamespace(run_id=number))

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
    ) -> None:
        for kind, items in (("metrics", metrics), ("params", params), ("tags", tags)):
            assert len(items) <= _MOST[kind]
            self._runs[run_id][kind] += map(astuple, items)

    def log_dict(self, run_id: str, dictionary: dict[str, Any], artifact_file: str) -> None:
        json.dumps(dictionary)
        self._runs[run_id]["files"].append(artifact_file)

    def log_artifact(self, run_id: str, local_path: str) -> None:
        self._runs[run_id]["files"].append(Path(local_path).name)

    def set_terminated(self, run_id: str) -> None:
        self._runs[run_id]["status"] = "FINISHED"
        kept = {"runs": self._runs, "experiment": self._experiment}
        self._file.write_text(json.dumps(kept), "utf-8")
