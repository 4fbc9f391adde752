"""The records of one sweep on disk: `<root>/<trial_id>/record.json`, written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness.errors import ConfigError
from harness.records.record import Record, validate

RECORD = "record.json"
MARKER = "published.json"
"""What the publisher leaves beside a record that it has published."""

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
    """A file that should be a record, but is invalid.

    Fields:
        path: path of the file.
        reason: what is wrong with it.
    """

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Everything that a sweep's folder holds.

    Fields:
        records: records by trial_id.
        unreadable: torn and foreign files, which are skipped.
    """

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
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as probe:
                fcntl.flock(probe, fcntl.LOCK_EX)
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
        folder.mkdir(parents=True, exist_ok=True)
        with opened_lock(folder / LOCK) as file:
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
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in {RECORD, MARKER, LOCK, CLAIM, ATTEMPT}:
                path.unlink()
        return folder

    def write(self, record: Record) -> Path:
        r"""Write `record`, replacing an earlier one of the same trial, and return its path.

        Half characters, which Python makes of bytes that are no UTF-8 in file names and messages, become
        words like `\udc80`: nothing that reads a record could write them again. A folder in its place goes.

        Raises:
            OSError: it cannot be written; an earlier record stands.
        """
        folder = self.trial_dir(record.trial_id)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        if (folder / RECORD).is_dir():
            shutil.rmtree(folder / RECORD)
        write_atomically(folder / RECORD, _HALF.sub(lambda half: rf"\\u{ord(half[0]):04x}", text) + "\n")
        return folder / RECORD

    def read(self, trial_id: str) -> Record:
        """Return the record of a trial.

        Raises:
            FileNotFoundError: there is none.
            OSError: this user may not read it.
            ValueError: the file is torn or foreign, or no file; the message says how.
        """
        record = validate(parsed(_text_of(self.record_path(trial_id))))
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


def _text_of(path: Path) -> str:
    """Return the text of a plain file; to open a pipe would wait for whoever writes to it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is no file")
    return path.read_text(encoding="utf-8")


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


def opened_lock(path: Path) -> IO[bytes]:
    """Return the file of a lock, made where it is missing; that of another user is locked for reading it.

    Raises:
        OSError: this user may not open it, or it is no file.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
    except PermissionError:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds, at any moment and after a crash, the old content or the new one.

    Raises:
        OSError: it cannot be written; the old content stands, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
