"""Files that only their owner may read and write, and that nobody else can have put there.

Folders of sweeps are often writable by a group. What a program unpickles or takes for a secret is therefore
read from a file of its own user alone.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

_PRIVATE = 0o600
_OF_OTHERS = 0o077


class ForeignFileError(PermissionError):
    """A file belongs to somebody else, or others may read or write it."""


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600, whole or not at all, whatever the umask is and whatever stood there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, _PRIVATE)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_private(path: Path) -> bytes:
    """Return the content of a file that `write_private` of the same user has written.

    Raises:
        ForeignFileError: it belongs to somebody else, others may read or write it, or it is no plain file.
        OSError: it cannot be opened.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 (a descriptor)
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFileError(f"{path}: must be a plain file")
        if found.st_uid != os.geteuid():
            raise ForeignFileError(
                f"{path}: must belong to user {os.geteuid()}, who runs this, got {found.st_uid}"
            )
        if found.st_mode & _OF_OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            raise ForeignFileError(f"{path}: must have mode {_PRIVATE:04o}, got {mode:04o}")
        return file.read()
