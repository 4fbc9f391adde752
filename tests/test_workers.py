"""Workers run every test once, a file at a time, and none is lost with a process that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import os

import pytest

from tests.workers import Workers


def pytest_configure(config):
    config.pluginmanager.register(Workers(2))


@pytest.fixture(scope="session")
def standing(tmp_path_factory):
    yield os.getpid()
    with open("gone", "a") as file:
        file.write("once\\n")


@pytest.fixture(scope="module")
def of_file(standing):
    return standing
"""
SAME = """
import os

RAN = []

def test_first(of_file, tmp_path):
    assert of_file == os.getpid()
    RAN.append(tmp_path)

def test_second(of_file, tmp_path):
    assert len(RAN) == 1 and tmp_path.exists() and RAN[0].exists() and RAN[0].parent == tmp_path.parent
"""
DIES = """
import os

def test_before(standing): pass
def test_dies(standing): os.abort()
def test_after(standing): pass
"""
FAILS = """
import os, sys

def test_fails():
    print("said to", "stdout")
    os.system("echo said by 'a' child")
    assert [1, 2] == [1, 3]

def test_passes(): pass
"""
TAKEN_DOWN = """
import pytest

@pytest.fixture(scope="session")
def stands():
    yield
    raise ValueError("not taken down")

def test_passes(stands): pass
"""


def ran(folder: Path, *words: str, **files: str) -> tuple[int, list[str], str]:
    """Return the exit code of pytest over some files, the lines of its results, and all that it says."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [*command, f"--basetemp={folder / 'temporary'}", "-o", f"pythonpath={ROOT}", *words, "."],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASSED ", "FAILED ", "ERROR "))]
    return done.returncode, sorted(lines), done.stdout + done.stderr


def test_each_test_runs_once_and_what_stands_is_taken_down_once_a_worker(tmp_path: Path) -> None:
    files = [f"f{number}" for number in range(5)]
    code, results, _ = ran(tmp_path, **dict.fromkeys(files, SAME))
    assert (code, len(results)) == (0, 10)
    assert results == sorted(
        f"PASSED test_{file}.py::test_{each}" for file in files for each in ("first", "second")
    )
    assert (tmp_path / "gone").read_text() == "once\n" * 2


def test_a_process_that_ends_fails_its_test_alone(tmp_path: Path) -> None:
    code, results, _ = ran(tmp_path, a=DIES, b=SAME)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert results == [
        "FAILED test_a.py::test_dies - its process ended with -6",
        *(f"PASSED test_{each}" for each in ("a.py::test_after", "a.py::test_before")),
        *(f"PASSED test_{each}" for each in ("b.py::test_first", "b.py::test_second")),
    ]


def test_a_failure_has_its_own_words_and_output(tmp_path: Path) -> None:
    code, results, said = ran(tmp_path, a=FAILS, b=SAME)
    assert (code, len(results)) == (pytest.ExitCode.TESTS_FAILED, 4)
    assert results[0] == "FAILED test_a.py::test_fails - assert [1, 2] == [1, 3]"
    assert said.count("said to stdout") == said.count("said by a child") == 1
    assert "At index 1 diff: 2 != 3" in said


def test_enough_failures_end_the_run(tmp_path: Path) -> None:
    code, results, said = ran(tmp_path, "--maxfail=1", a=FAILS, **{f"f{n}": SAME for n in range(20)})
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in said
    assert len(results) < 42


def test_what_stands_and_cannot_be_taken_down_is_a_failure(tmp_path: Path) -> None:
    code, results, said = ran(tmp_path, a=TAKEN_DOWN)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert results[0] == "FAILED test_a.py::test_passes - its process ended with 1"
    assert "ValueError: not taken down" in said


@pytest.mark.parametrize("words", [("--collect-only",), ()], ids=["collected alone", "not collected"])
def test_no_worker_starts_where_nothing_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    broken = {} if words else {"b": "1 / 0"}
    code, _, said = ran(tmp_path, *words, a=SAME, **broken)
    assert code == (pytest.ExitCode.OK if words else pytest.ExitCode.INTERRUPTED)
    assert not (tmp_path / "gone").exists()
    assert ("2 tests collected" if words else "1 error") in said
