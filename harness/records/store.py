"""The records of one sweep on disk: `<root>/<trial_id>/record.json`, written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.records import files
from harness.records.record import Record, validate

RECORD = "record.json"
MARKER = "published.json"
"""What the publisher leaves next to a record that it has published."""

LOCK = ".lock"
"""What a command holds while it decides about a trial and runs it; it stays, because a lock on a file that
another command deletes protects nothing."""

CLAIM = "claim.json"
"""File that names the submission for which a trial is to run."""

ATTEMPT = "attempt.json"
"""File that says that a trial has been started, for which submission, by whom."""

SUBMISSIONS = ".submissions"
"""Folder below the sweep's that holds what was handed to lanes and schedulers."""

FINISHED = ("ok", "oom", "refused")
"""Statuses that are results. A trial that failed, timed out or lost a rank runs again, as make runs what
failed; `rerun=true` runs any."""

MOST_BYTES = 64 * 2**20
"""Size up to which a record is read; timelines of large models take 2 MiB."""

_ESCAPED_HALF = re.compile(r"\\u[dD]")
_HALF = re.compile("[\ud800-\udfff]")
_NOT_THE_TRIAL = ("name", "tracker", "launcher")
_LOCK_POLL_S = 0.1
_LONG_NUMBER = re.compile(r"\d{19}")
_MOST_BITS = 63
_MAX_DIGITS = 20
_MAX_NAME_BYTES = 255  # of a folder, on every usual file system


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A file that should be a record, but is invalid. `reason`: what is wrong with it."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Everything that a sweep's folder holds. `unreadable`: torn and foreign files, which are skipped."""

    records: tuple[Record, ...]
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """The records of one sweep.

    Fields:
        root: the sweep's folder, `outputs/<name>`; made by the first that writes there.
    """

    root: Path

    def trial_dir(self, trial_id: str) -> Path:
        """Return the folder of a trial, which need not exist."""
        return self.root / trial_id

    def record_path(self, trial_id: str) -> Path:
        """Return the path of a trial's record, which need not exist."""
        return self.trial_dir(trial_id) / RECORD

    def require_writable(self) -> None:
        """Make the sweep's folder and refuse one where no file can be written and locked.

        Raises:
            ConfigError: naming `outputs_dir` and what the operating system said.
        """
        try:
            files.require_writable(self.root)
        except OSError as error:
            raise ConfigError("outputs_dir", f"cannot write {str(self.root)!r}: {error.strerror}") from error

    @contextmanager
    def locked(self, trial_id: str | None = None) -> Iterator[bool]:
        """Try to hold a trial, or the whole sweep, against other processes; yield whether it is held.

        The kernel lets go of what a dead process held.

        Args:
            trial_id: `None` is the sweep, held while a command plans and hands trials over.

        Raises:
            OSError: there can be no such lock, or this user may not open it.
        """
        folder = self.root if trial_id is None else self.trial_dir(trial_id)
        files.make_folder(folder, within=self.root)
        with files.opened_lock(folder / LOCK, within=self.root) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Hold the whole sweep, as soon as no other command does: nobody else hands over the same trials."""
        while True:
            with self.locked() as is_held:
                if is_held:
                    yield
                    return
            time.sleep(_LOCK_POLL_S)

    def prepare(self, trial_id: str) -> Path:
        """Return the folder of a trial that is about to run, cleared of what an earlier attempt left.

        An earlier record stays until the new one replaces it.

        Raises:
            OSError: something in the folder cannot be removed, or there can be no folder.
        """
        folder = self.trial_dir(trial_id)
        files.make_folder(folder, within=self.root)
        files.clear(folder, within=self.root, but={RECORD, MARKER, LOCK, CLAIM, ATTEMPT})
        return folder

    def write_file(self, path: Path, text: str) -> None:
        """Write a file below the sweep's folder that others read as far as the user's umask lets them.

        Raises:
            OSError: it cannot be written; what stood there stands.
        """
        files.write_atomically(path, text, within=self.root, mode=files.SHARED)

    def write(self, record: Record) -> Path:
        r"""Write `record`, replacing an earlier one of the same trial, and return its path.

        Half characters, which Python makes of bytes that are no UTF-8 in file names and messages, become
        words like `\udc80`: nothing that reads a record could write them again. A folder in its place goes.

        Raises:
            OSError: it cannot be written; an earlier record stands.
        """
        folder = self.trial_dir(record.trial_id)
        files.make_folder(folder, within=self.root)
        text = json.dumps(record.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        if (folder / RECORD).is_dir():
            files.remove(folder / RECORD, within=self.root)
        self.write_file(folder / RECORD, _HALF.sub(lambda half: rf"\\u{ord(half[0]):04x}", text) + "\n")
        return folder / RECORD

    def read(self, trial_id: str) -> Record:
        """Return the record of a trial.

        Raises:
            FileNotFoundError: there is none.
            OSError: this user may not read it.
            ValueError: the file is torn or foreign, or no file; the message says how.
        """
        record = validate(parsed(files.read_text(self.record_path(trial_id), MOST_BYTES)))
        if record.trial_id != trial_id:
            raise ValueError(f"record.trial_id: must be {trial_id!r} as its folder, got {record.trial_id!r}")
        return record

    def digest(self, trial_id: str) -> str:
        """Return 12 hexadecimal digits of the SHA-256 of a trial's record file.

        Raises:
            FileNotFoundError: there is none.
        """
        return hashlib.sha256(self.record_path(trial_id).read_bytes()).hexdigest()[:12]

    def finished(self, trial_id: str, environment_id: str) -> Record | None:
        """Return the record that makes running this trial in this environment unnecessary, or `None`."""
        try:
            record = self.read(trial_id)
        except (OSError, ValueError):
            return None
        is_same = record.environment_id == environment_id
        return record if is_same and record.status in FINISHED else None

    def scan(self) -> Scan:
        """Return all records, and what stands where a record should."""
        records, unreadable = [], []
        for path in sorted(self.root.glob(f"*/{RECORD}")):
            if not re.fullmatch(r"[0-9a-f]{12}", path.parent.name):
                continue
            try:
                records.append(self.read(path.parent.name))
            except (OSError, ValueError) as error:
                unreadable.append(Unreadable(path=path, reason=str(error)))
        return Scan(records=tuple(records), unreadable=tuple(unreadable))


def trial_id(experiment: Mapping[str, Any]) -> str:
    """Return the content address of a resolved experiment: 12 hexadecimal digits.

    It is the start of the SHA-256 of the experiment as canonical JSON (keys sorted, no spaces), without what
    does not change the trial: name, tracker and launcher.

    Raises:
        ValueError: the experiment holds a number that is not finite.
    """
    kept = {key: value for key, value in experiment.items() if key not in _NOT_THE_TRIAL}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def parsed(text: str) -> Any:
    """Return the JSON value that `text` describes.

    Raises:
        ValueError: it is no JSON, holds half a character or an integer of more than 64 bits, or is nested
            too deep.
    """
    try:
        value = json.loads(text, parse_int=_integer if _LONG_NUMBER.search(text) else None)
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    if _ESCAPED_HALF.search(text):  # two of them may be a whole one
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _integer(digits: str) -> int:
    if len(digits) <= _MAX_DIGITS and (number := int(digits)).bit_length() <= _MOST_BITS:
        return number
    raise ValueError(f"an integer must have at most 64 bits, got {digits[:_MAX_DIGITS]}...")


def check_name(name: str) -> None:
    """Refuse a sweep name that is not the name of one folder.

    Raises:
        ConfigError: it is empty, `.` or `..`, too long, or holds a separator or a control character.
    """
    if not name.strip() or name in {".", ".."}:
        raise ConfigError("name", f"must name a folder below outputs_dir, got {name!r}")
    if any(character in "/\\" or not character.isprintable() for character in name):
        raise ConfigError("name", f"must hold no path separator and no control character, got {name!r}")
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError("name", f"must be at most {_MAX_NAME_BYTES} bytes, got {len(name.encode())}")
