"""Results that hold for many trials of a sweep, kept in its folder: each is found once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from harness.experiment.experiment import Experiment
from harness.measure.environment import describe, environment_id
from harness.records.fields import decode_file, encode
from harness.records.files import write_atomically
from harness.records.store import MOST_BYTES

T = TypeVar("T")

_DIGITS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedResults:
    """Finds once what is the same for all trials of a folder, in one environment and with as many threads.

    Fields:
        rank: this one; each keeps what it saw.
        earliest: returns the earliest of the steps that the ranks give; they all call it.
    """

    folder: Path
    rank: int
    device: torch.device
    earliest: Callable[[int | None], int | None]

    def once(self, kind: str, cls: type[T], experiment: Experiment, find: Callable[[], T | None]) -> T | None:
        """Return what `find` returns, or what it returned in an earlier trial on every rank.

        Args:
            kind: what is found; begins the name of its file.
            cls: a dataclass that `decode` reads.
            experiment: all that the result depends on, besides the environment.
        """
        path = self._path(kind, experiment)
        known = decode_file(cls, path, MOST_BYTES)  # None: not there yet, or nothing of ours
        if self.earliest(0 if known is None else None) is None:
            return known
        found = find()
        if found is not None:
            with suppress(OSError):  # a folder that nobody may write to
                # what the machine loses is found again
                write_atomically(path, json.dumps(encode(found)), is_durable=False)
        return found

    def _path(self, kind: str, experiment: Experiment) -> Path:
        environment = environment_id(describe(self.device, experiment.files))
        threads = torch.get_num_threads()
        canonical = json.dumps([experiment.to_dict(), environment, threads], sort_keys=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:_DIGITS]
        return self.folder / f".{kind}-{digest}-rank{self.rank}.json"
