"""Proofs that hold for many trials of a sweep, kept in its folder: of tensor parallel plans."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.experiment.experiment import Experiment
from harness.experiment.protocol import Protocol
from harness.measure.environment import describe, environment_id
from harness.records.fields import decode_file
from harness.records.files import write_atomically
from harness.records.parity_result import Parity
from harness.records.store import MOST_BYTES
from harness.trial.links import Link

_DIGITS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedProof:
    """Compares once what is the same for all trials of a folder, in one environment.

    Fields:
        rank: this one; each keeps what it saw.
        earliest: returns the earliest of the steps that the ranks give; they all call it.
    """

    folder: Path
    rank: int
    device: torch.device
    earliest: Callable[[int | None], int | None]

    def __call__(self, link: Link, compare: Callable[[], Parity | None]) -> Parity | None:
        """Return what `compare` returns, or what it returned in an earlier trial on every rank."""
        path = self._path(link.variant)
        known = decode_file(Parity, path, MOST_BYTES)  # None: not there yet, or nothing of ours
        if self.earliest(0 if known is None else None) is None:
            return known
        found = compare()
        if found is not None:
            _write(path, found)
        return found

    def _path(self, experiment: Experiment) -> Path:
        resolved = dataclasses.replace(experiment, protocol=Protocol()).to_dict()
        environment = environment_id(describe(self.device, experiment.files))
        canonical = json.dumps([resolved, environment], sort_keys=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:_DIGITS]
        return self.folder / f".dense-{digest}-rank{self.rank}.json"


def _write(path: Path, parity: Parity) -> None:
    with suppress(OSError):  # a folder that nobody may write to
        write_atomically(path, json.dumps(parity.as_json()))
