"""Files that a user names are plain files of a sensible size; what is written is written whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from strategies.text_files import read_text, write_text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(os.mkfifo, "it is no plain file", id="a pipe"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "it is no plain file", id="a device"),
        pytest.param(Path.mkdir, "it is no plain file", id="a folder"),
        pytest.param(
            lambda path: path.write_text("x" * (2**20 + 1)), "it is larger than 1 MiB", id="too long"
        ),
    ],
)
def test_only_a_plain_file_of_a_sensible_size_is_read(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=reason):
        read_text(tmp_path / "file", 2**20)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("PRIVATE KEY")
    (tmp_path / "plan.json").symlink_to(tmp_path / "key")
    write_text(tmp_path / "plan.json", "{}")
    assert ((tmp_path / "key").read_text(), read_text(tmp_path / "plan.json")) == ("PRIVATE KEY", "{}")


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "plan.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "plan.json", "new \ud800")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("plan.json", "old")]
