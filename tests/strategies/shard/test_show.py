"""The show command: its table is the documentation's, and what is wrong with its arguments is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strategies.shard.show.__main__ import main

_NOTE = Path(__file__).parents[3] / "docs/design/0009-sharding-candidates.md"
_COMMAND = "python -m strategies.shard.show linear --input 4,4,4,16 --out 32 --mesh 2,2"
_OPTIONS = _COMMAND.split()[3:]


def test_the_documented_table_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_OPTIONS) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert f"$ {_COMMAND}\n" + "\n".join(lines) in _NOTE.read_text("utf-8")


def test_the_complete_set_has_a_line_a_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_OPTIONS, "--mode", "complete", "--no-bias"]) == 0
    table = capsys.readouterr().out
    assert table.count(" = ") == 36
    assert "bias" not in table


def test_the_command_runs_without_a_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *_COMMAND.split()[1:]], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


REFUSED: dict[str, tuple[list[str], str]] = {
    "a size of zero": (
        ["linear", "--input", "4,0", "--out", "32", "--mesh", "2,2"],
        "input_shape: must hold sizes of at least 1, got (4, 0)\n",
    ),
    "no output": (
        ["linear", "--input", "4,16", "--out", "0", "--mesh", "2,2"],
        "out_features: must hold sizes of at least 1, got (0,)\n",
    ),
    "a mesh without ranks": (
        ["linear", "--input", "4,16", "--out", "32", "--mesh", "2,0"],
        "mesh_shape: must hold sizes of at least 1, got (2, 0)\n",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", message)


def test_text_that_is_no_shape_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["linear", "--input", "4x16", "--out", "32", "--mesh", "2,2"])
    assert stopped.value.code == 2
    message = "error: argument --input: must be integers with commas between, got '4x16'"
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m strategies.shard.show linear: {message}"
