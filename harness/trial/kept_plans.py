"""Plans kept in the folder of a sweep: what a prediction has found, its trial need not search for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from harness.experiment.experiment import Experiment
from harness.measure.environment import environment_id, identity
from harness.records.files import read_text, write_atomically
from strategies.budget.kept import kept_by
from strategies.text_files import MOST_BYTES

_DIGITS = 32


@contextmanager
def plans_kept_in(folder: Path | None, experiment: Experiment, device: torch.device) -> Iterator[None]:
    """Keep in a folder what is planned within the scope, and find there what was planned for equal steps.

    Args:
        folder: that of a sweep; `None` keeps nothing.
        experiment: names the user's files, which belong to the environment.
    """
    if folder is None:
        yield
        return
    with kept_by(_Folder(folder, experiment, device)):
        yield


class _Folder:
    """A folder with a file for each name, in one environment."""

    def __init__(self, folder: Path, experiment: Experiment, device: torch.device) -> None:
        self._folder = folder
        self._experiment = experiment
        self._device = device

    def read(self, name: str) -> Any:
        """Return what was written under a name; `None` where nothing was, or it is torn."""
        try:
            return json.loads(read_text(self._path(name), MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, name: str, found: Any) -> None:
        """Keep JSON values under a name."""
        with suppress(OSError):  # a folder that nobody may write to
            # what the machine loses is found again
            write_atomically(self._path(name), json.dumps(found), is_durable=False)

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(f"{self._environment} {name}".encode()).hexdigest()[:_DIGITS]
        return self._folder / f".plan-{digest}.json"

    @cached_property
    def _environment(self) -> str:
        return environment_id(identity(self._device, self._experiment.files))
