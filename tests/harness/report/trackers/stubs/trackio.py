"""A stub of trackio's public functions (0.43) as `trackio_runs` calls them; a project is a JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_HOME = Path(os.environ["TRACKIO_DIR"])
_open: list[tuple[str, dict[str, Any]]] = []


def _kept(project: str) -> list[dict[str, Any]]:
    file = _HOME / f"{project}.json"
    if not file.exists():
        raise ValueError(f"Project '{project}' does not exist")
    found: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
    return found


class Table:
    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        self.shown = {"columns": columns, "data": data}


class Run:
    def __init__(self, project: str, name: str) -> None:
        self.project, self.name = project, name

    def delete(self) -> bool:
        left = [run for run in _kept(self.project) if run["name"] != self.name]
        (_HOME / f"{self.project}.json").write_text(json.dumps(left), "utf-8")
        return True


class Api:
    def runs(self, project: str) -> list[Run]:
        return [Run(project, run["name"]) for run in _kept(project)]


def init(
    project: str,
    name: str,
    group: str,
    config: dict[str, Any],
    *,
    embed: bool,
    auto_log_gpu: bool,
    auto_log_cpu: bool,
) -> None:
    assert (embed, auto_log_gpu, auto_log_cpu) == (False, False, False)
    _open.append((project, {"name": name, "group": group, "config": config, "logged": []}))


def log(metrics: dict[str, Any], step: int | None = None) -> None:
    shown = {key: value.shown if isinstance(value, Table) else value for key, value in metrics.items()}
    _open[-1][1]["logged"].append({"step": step, **shown})


def finish() -> None:
    project, run = _open.pop()
    try:
        runs = _kept(project)
    except ValueError:
        runs = []
    (_HOME / f"{project}.json").write_text(json.dumps([*runs, run]), "utf-8")
