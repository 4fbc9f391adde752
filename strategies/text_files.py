"""Text files that a user names: read up to a limit and only if they are plain files; written whole."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 256 * 2**20
"""Size up to which a file is read: a plan of a thousand blocks with all its operators has a tenth of it."""


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file; a pipe or a device is not waited for.

    Raises:
        OSError: it cannot be opened, is no plain file, or is larger than `most_bytes`.
        UnicodeDecodeError: it is no UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes // 2**20} MiB", str(path))
    return content.decode("utf-8-sig")  # some editors begin a file with a mark of its encoding


def write_text(path: Path, text: str) -> None:
    """Write a new file in place of what is there: a link is replaced, and not followed.

    Raises:
        OSError: it cannot be written; what was there stands.
    """
    content = text.encode()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
