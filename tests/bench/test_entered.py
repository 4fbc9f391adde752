from __future__ import annotations

from pathlib import Path

import pytest

from bench.entered import Entered, entered

PROGRAM = """\
import os
import threading
from project.room.words import Word

def main():
    words = [Word(letter).text() for letter in "ab"]
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    if os.fork() == 0:
        in_a_child()
        os._exit(0)
    os.wait()

def in_a_thread():
    def nested():
        return (lambda: 1)()
    return nested()

def in_a_child():
    pass

def never():
    pass

class NoFunction:
    main()
"""
WORDS = """\
class Word:
    def __init__(self, letter):
        self.letter = letter

    def text(self):
        return self.letter

    def other(self):
        return other()

def other():
    pass
"""


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        pytest.param(
            ["project"],
            Entered(files=2, functions=6, rooms={"project/__main__.py": 4, "project/room": 2}),
            id="in all processes and threads",
        ),
        pytest.param(
            ["project/room"], Entered(files=1, functions=2, rooms={"project/room": 2}), id="of one folder"
        ),
    ],
)
def test_what_a_command_enters(tmp_path: Path, packages: list[str], expected: Entered) -> None:
    (tmp_path / "project" / "room").mkdir(parents=True)
    (tmp_path / "project" / "__main__.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "project" / "room" / "words.py").write_text(WORDS, encoding="utf-8")
    assert entered(tmp_path, ["-m", "project"], packages) == expected
