"""The one door through which files below a sweep's folder are written.

Folders of sweeps are often writable by a group. Whoever may write there can put a link to somebody else's
file under a name that acbench is about to write to. So every writer of acbench comes through here:

* no link is followed, neither that of the file nor that of a folder below the sweep's (`within`);
* a new file is always one that did not exist before: what stood there is replaced, never written into;
* temporary names cannot be guessed;
* a file is for its owner alone, unless the writer asks for `SHARED`, which the user's umask then bounds.

What a program unpickles or takes for a secret is read through here too: from a file of its own user alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

OWN = 0o600
"""Mode of a file for its owner alone, whatever the umask is."""

SHARED = 0o666
"""Mode of a file that others read as far as the user's umask lets them: records, reports, locks, claims."""

_MODE_OF_FOLDERS = 0o777
_OF_OTHERS = 0o077
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_ATTEMPTS = 10
"""How often a name is freed for a new file before somebody who fills it again has won."""


class ForeignFileError(PermissionError):
    """A file belongs to somebody else, or others may read or write it."""


def write_atomically(
    path: Path,
    content: str | bytes,
    *,
    within: Path | None = None,
    mode: int = OWN,
    is_durable: bool = True,
) -> None:
    """Write a file so that `path` holds, at any moment and after a crash, the old content or the new one.

    Args:
        path: where; a link that stands there is replaced, not followed.
        content: what; text becomes UTF-8.
        within: folder above `path` below which no folder may be a link; by default that of the file.
        mode: `OWN` or `SHARED`.
        is_durable: whether the file has to survive the machine.

    Raises:
        OSError: it cannot be written; the old content stands, and nothing is left next to it.
    """
    whole = content if isinstance(content, bytes) else content.encode()
    with _opened(path.parent, within) as folder, _named(path):
        temporary = f".{path.name}.{secrets.token_hex(8)}.tmp"
        try:
            with _new(temporary, folder, mode) as file:
                file.write(whole)
                file.flush()
                if is_durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        if is_durable:
            os.fsync(folder)


def write_once(path: Path, content: str, *, within: Path | None = None) -> None:
    """Write a file whole unless there is one already: whoever is first decides.

    Raises:
        OSError: it cannot be written, or the file system has no links.
    """
    with _opened(path.parent, within) as folder, _named(path):
        temporary = f".{path.name}.{secrets.token_hex(8)}.tmp"
        try:
            with _new(temporary, folder, OWN) as file:
                file.write(content.encode())
            with suppress(FileExistsError):
                os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)


def new_file(path: Path, *, within: Path | None = None) -> IO[bytes]:
    """Return a new and empty file, open to be appended to, in place of whatever stood there.

    Raises:
        OSError: there can be none: no folder, no space, or somebody fills the name again and again.
    """
    with _opened(path.parent, within) as folder, _named(path):
        for _ in range(_MOST_ATTEMPTS):
            _remove(path.name, folder)
            with suppress(FileExistsError):
                return _new(path.name, folder, OWN)
    raise FileExistsError(errno.EEXIST, "somebody else makes files of this name", str(path))


def shorten(path: Path, *, most_bytes: int, note: Callable[[int], str], within: Path | None = None) -> int:
    """Cut the middle out of a log that has grown too long, while others append to it; return what was cut.

    The first and the last quarter of `most_bytes` stay. What is written at this moment may be lost.

    Args:
        path: a file of this user that `new_file` has made; nothing happens to any other.
        most_bytes: size up to which it is left alone.
        note: returns what is written in place of so many bytes.
        within: as of `write_atomically`.

    Raises:
        OSError: it cannot be opened or written.
    """
    kept = most_bytes // 4
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _opened(path.parent, within) as folder, _named(path):
        descriptor = os.open(path.name, flags, dir_fd=folder)
        try:
            found = os.fstat(descriptor)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
            if not is_ours or found.st_size <= most_bytes:
                return 0
            cut = found.st_size - 2 * kept
            tail = os.pread(descriptor, kept, kept + cut)
            os.ftruncate(descriptor, kept)
            os.write(descriptor, note(cut).encode() + tail)
        finally:
            os.close(descriptor)
    return cut


def make_folder(path: Path, *, within: Path | None = None, mode: int = _MODE_OF_FOLDERS) -> Path:
    """Make a folder and those above it where they are missing, and return it.

    Args:
        within: folder above it below which no folder may be a link; by default `path`, as the user named it.
        mode: mode of folders that are made, bounded by the umask.

    Raises:
        OSError: there can be none, or a link stands in its place.
    """
    base = path if within is None else within
    base.mkdir(parents=True, exist_ok=True)
    made = base
    for part in path.relative_to(base).parts:
        with _opened(made, base) as folder, suppress(FileExistsError), _named(made / part):
            os.mkdir(part, mode, dir_fd=folder)
        made /= part
    try:
        with _opened(path, within):  # a folder, and no link
            return path
    except NotADirectoryError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error


def make_private_folder(path: Path, *, within: Path) -> None:
    """Make a folder that its owner alone may use; one that is there and the owner's is closed to others.

    Raises:
        ForeignFileError: it, or something in it, belongs to somebody else.
        OSError: there can be none, or a link stands in its place.
    """
    make_folder(path, within=within, mode=0o700)
    with _opened(path, within) as folder:
        _require_owner(path, os.fstat(folder))
        os.fchmod(folder, 0o700)
        for name in os.listdir(folder):  # noqa: PTH208 (a descriptor)
            _require_owner(path / name, os.stat(name, dir_fd=folder, follow_symlinks=False))


def require_writable(path: Path) -> None:
    """Make a folder where it is missing; refuse one where no file can be written and locked.

    Raises:
        OSError: what the system said.
    """
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as probe:
        fcntl.flock(probe, fcntl.LOCK_EX)


def remove(path: Path, *, within: Path | None = None) -> None:
    """Remove a file, a link or a folder with all that it holds, where there is one.

    Raises:
        OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError), _opened(path.parent, within) as folder, _named(path):
        _remove(path.name, folder)


def clear(path: Path, *, within: Path | None = None, but: Collection[str] = ()) -> None:
    """Remove all that a folder holds; files that are named in `but` stay.

    Raises:
        OSError: something in it cannot be removed.
    """
    with _opened(path, within) as folder:
        for name in os.listdir(folder):  # noqa: PTH208 (a descriptor)
            with _named(path / name):
                if name not in but or _is_folder(name, folder):
                    _remove(name, folder)


def opened_lock(path: Path, *, within: Path | None = None) -> IO[bytes]:
    """Return the file of a lock, made where it is missing; that of another user is locked for reading it.

    Raises:
        OSError: this user may not open it, or it is no file.
    """
    plain = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _opened(path.parent, within) as folder, _named(path):
        try:
            descriptor = os.open(path.name, os.O_RDWR | os.O_CREAT | plain, SHARED, dir_fd=folder)
            return os.fdopen(descriptor, "r+b", buffering=0)
        except PermissionError:
            return os.fdopen(os.open(path.name, os.O_RDONLY | plain, dir_fd=folder), "rb", buffering=0)


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a plain file.

    Raises:
        ValueError: as `read_bytes`, or it is no UTF-8.
        OSError: it cannot be opened.
    """
    return read_bytes(path, most_bytes).decode("utf-8")


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Return the content of a plain file; to open a pipe would wait for whoever writes to it.

    Raises:
        ValueError: it is no plain file, or larger than `most_bytes`.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is no file")
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"is larger than {most_bytes / 2**20:g} MiB")
    return content


def read_private(path: Path) -> bytes:
    """Return the content of a file of mode `OWN` that the same user has written through this door.

    Raises:
        ForeignFileError: it belongs to somebody else, others may read or write it, or it is no plain file.
        OSError: it cannot be opened.
    """
    with _opened(path.parent, None) as folder, _named(path):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, dir_fd=folder)
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFileError(f"{path}: must be a plain file")
        _require_owner(path, found)
        if found.st_mode & _OF_OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            raise ForeignFileError(f"{path}: must have mode {OWN:04o}, got {mode:04o}")
        return file.read()


def _require_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        problem = f"{path}: must belong to user {os.geteuid()}, who runs this"
        raise ForeignFileError(f"{problem}, got {found.st_uid}")


@contextmanager
def _opened(path: Path, within: Path | None) -> Iterator[int]:
    """Open a folder, from `within` on without following a link; yield its descriptor."""
    reached = path if within is None else within
    descriptor = os.open(reached, _FOLDER)
    try:
        for part in path.relative_to(reached).parts:
            reached /= part
            with _named(reached):
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error name the whole path, and say so where a link stands there that is not followed."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and path.is_symlink():
            problem = "is a symbolic link, which is not followed in the folder of a sweep"
            raise OSError(errno.ELOOP, problem, str(path)) from error
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _new(name: str, folder: int, mode: int) -> IO[bytes]:
    descriptor = os.open(name, _NEW | os.O_APPEND, mode, dir_fd=folder)
    if mode == OWN:
        os.fchmod(descriptor, mode)  # whatever umask the user's code has set
    return open(descriptor, "wb")  # noqa: PTH123 (a descriptor)


def _remove(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        if _is_folder(name, folder):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def _is_folder(name: str, folder: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
