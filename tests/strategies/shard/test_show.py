"""The show command: its table is the documentation's, and what is wrong with its arguments is said."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from strategies.shard.operators.catalogue import OPERATORS
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


COMMANDS: dict[str, tuple[str, int]] = {
    "matmul": ("matmul --input 4,8 --other 8,16", 14),
    "matmul, complete": ("matmul --input 4,8 --other 8,16 --mode complete", 16),
    "bmm": ("bmm --input 4,8,16 --other 4,16,8", 7),
    "addmm": ("addmm --input 16 --mat1 4,8 --mat2 8,16", 14),
    "conv2d": ("conv2d --input 4,4,64,64 --weight 16,4,3,3 --padding 1", 16),
    "conv2d of groups": ("conv2d --input 4,4,8,8 --weight 4,1,3,3 --groups 4 --stride 2 --no-bias", 9),
    "embedding": ("embedding --input 4,16,16 --rows 16 --width 32", 19),
    "layer_norm": ("layer_norm --input 4,4,4,16 --normalized 16 --no-bias", 16),
    "batch_norm": ("batch_norm --input 4,16,64,64", 9),
    "view": ("view --input 4,8 --shape 32", 4),
    "permute": ("permute --input 4,8 --dims 1,0", 9),
    "permute, from the end": ("permute --input 4,8 --dims -1,0", 9),
    "transpose": ("transpose --input 4,8 --dim0 0 --dim1 -1", 9),
    "split": ("split --input 4,8 --sizes 2,6 --dim 1", 4),
    "softmax": ("softmax --input 4,8", 4),
    "sum, from the end": ("sum --input 4,8 --dims -2,-1", 9),
    "getitem from the end": ("getitem --input 4,8,4 --index -1:,None,...", 9),
    "sum": ("sum --input 4,8 --dims 0,1 --keepdim", 9),
    "getitem": ("getitem --input 4,8,4 --index 1:,None,...", 9),
    "elementwise": ("elementwise --input 4,1 --input 8", 9),
}


def test_every_operator_of_the_table_has_a_command() -> None:
    assert {"linear", *(command.partition(" ")[0] for command, _ in COMMANDS.values())} == set(OPERATORS)


@pytest.mark.parametrize(("command", "count"), COMMANDS.values(), ids=COMMANDS)
def test_every_operator_is_shown(command: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--mesh", "2,2"]) == 0
    table = capsys.readouterr().out
    assert table.count(" = ") == count
    assert f"\n{count} candidates. " in table


def test_operators_without_a_set_of_the_peer_have_no_mode(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["softmax", "--input", "4,8", "--mesh", "2,2", "--mode", "classic"])
    assert stopped.value.code == 2
    message = "python -m strategies.shard.show: error: unrecognized arguments: --mode classic"
    assert capsys.readouterr().err.splitlines()[-1] == message


def test_the_module_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["show", *_OPTIONS])
    monkeypatch.delitem(sys.modules, "strategies.shard.show.__main__")  # as in a new process
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("strategies.shard.show", run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.count(" = ") == 24


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


UNREADABLE: dict[str, tuple[str, str]] = {
    "a shape": (
        "linear --input 4x16 --out 32 --mesh 2,2",
        "argument --input: must be comma-separated integers, got '4x16'",
    ),
    "an index": (
        "getitem --input 4,16 --index 0,x --mesh 2,2",
        "argument --index: must be comma-separated integers, slices, None and ..., got '0,x'",
    ),
    "a missing option": (
        "bmm --input 4,8,16 --mesh 2,2",
        "the following arguments are required: --other",
    ),
}


@pytest.mark.parametrize(("command", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_refused(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"python -m strategies.shard.show {command.split(maxsplit=1)[0]}: error: {message}"
