"""A command of several parts runs the one that is named, and every part is a module that runs."""

from __future__ import annotations

import ast
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.output import parser, run_part

BENCH = Path(__file__).parents[2] / "bench"
COMMANDS = [path.parent.name for path in sorted(BENCH.glob("*/__main__.py"))]
PARTS = {"first": "of nothing", "second": "of nothing either"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_part_runs(command: str) -> None:
    for part in import_module(f"bench.{command}.__main__").PARTS:
        tree = ast.parse((BENCH / command / f"{part}.py").read_text("utf-8"))
        (main,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main")
        assert [each.arg for each in main.args.args] == ["words"]


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        pytest.param([], ("first", []), id="the first"),
        pytest.param(["--pairs", "3"], ("first", ["--pairs", "3"]), id="its options"),
        pytest.param(
            ["--part", "second", "--pairs", "3"], ("second", ["--pairs", "3"]), id="a part and its options"
        ),
        pytest.param(["--part=second", "--pa", "3"], ("second", ["--pa", "3"]), id="nothing is abbreviated"),
    ],
)
def test_the_named_part_runs(
    words: list[str], ran: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, list[str]]] = []

    def ran_as(name: str, words: list[str]) -> int:
        found.append((name, words))
        return 0

    for name in PARTS:
        part = SimpleNamespace(main=partial(ran_as, name))
        monkeypatch.setitem(sys.modules, f"bench.command.{name}", part)
    monkeypatch.setitem(sys.modules, "bench.command", SimpleNamespace(__path__=[]))
    monkeypatch.setattr(sys, "argv", ["command", *words])
    with pytest.raises(SystemExit) as ended:
        run_part("command", PARTS)
    assert (ended.value.code, found) == (0, [ran])


def test_a_part_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "--part", "third"])
    with pytest.raises(SystemExit):
        run_part("command", PARTS)
    assert "choose from first, second" in capsys.readouterr().err.replace("'", "")


def test_a_file_is_called_after_its_part() -> None:
    assert parser("", "steps", "overhead").parse_args([]).out == Path("outputs/bench/steps.json")
