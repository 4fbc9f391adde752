"""Files below a sweep's folder are written through one door: no other module opens a file for writing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_DOOR = "harness/records/files.py"
_ELSEWHERE = {
    "strategies/text_files.py": "the same door for strategies, which know no harness",
    "harness/measure/memory/counting_allocator.py": "compiles into the user's cache",
    "harness/check/workshop.py": "a plan in a temporary folder of its own",
    "hydra_plugins/acbench/entry.py": "opens /dev/null",
}
"""Modules that write what is not below a sweep's folder, and what that is."""

_METHODS = {"write_text", "write_bytes", "touch", "mkdir", "symlink_to", "hardlink_to", "chmod", "rmdir"}
_OF_OS = {
    "open",
    "link",
    "symlink",
    "mkdir",
    "makedirs",
    "remove",
    "removedirs",
    "mkfifo",
    "truncate",
    "chmod",
}
_OF_SHUTIL = {"copy", "copy2", "copyfile", "copytree", "move", "rmtree"}
_OF_TEMPFILE = {"TemporaryFile", "NamedTemporaryFile", "TemporaryDirectory", "mkstemp", "mkdtemp"}
_READS = {"r", "rb", "rt"}


@pytest.mark.parametrize("package", ["acbench", "harness", "hydra_plugins", "strategies"])
def test_no_other_module_writes_files(package: str) -> None:
    found = [
        f"{name}:{line} {call}"
        for path in sorted((_ROOT / package).rglob("*.py"))
        if (name := path.relative_to(_ROOT).as_posix()) not in {_DOOR, *_ELSEWHERE}
        for line, call in _writes(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("name", _ELSEWHERE)
def test_who_is_allowed_to_write_elsewhere_does(name: str) -> None:
    assert list(_writes((_ROOT / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("code", "is_write"),
    [
        ("path.open('w')", True),
        ("path.open(mode='ab')", True),
        ("open(path, 'x')", True),
        ("open(path, mode)", True),
        ("(a / b).write_text(text)", True),
        ("os.open(path, flags)", True),
        ("os.link(a, b)", True),
        ("shutil.rmtree(a)", True),
        ("tempfile.mkstemp(dir=folder)", True),
        ("json.dump(value, file)", False),
        ("tempfile.TemporaryDirectory()", False),
        ("path.open()", False),
        ("open(path, 'rb')", False),
    ],
)
def test_the_walk_sees_writes(code: str, *, is_write: bool) -> None:
    assert bool(list(_writes(code))) == is_write


def _writes(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_write(node):
            yield node.lineno, ast.unparse(node.func)


def _is_write(call: ast.Call) -> bool:
    words = {word.arg: word.value for word in call.keywords}
    modes = [words["mode"]] if "mode" in words else []
    match call.func:
        case ast.Name("open"):  # with `closefd`, of a descriptor that is open already
            return "closefd" not in words and not _only_reads([*call.args[1:2], *modes])
        case ast.Attribute(ast.Name("os" | "shutil"), name):
            return name in _OF_OS | _OF_SHUTIL
        case ast.Attribute(ast.Name("tempfile"), name):
            return name in _OF_TEMPFILE and ("dir" in words or name.startswith("mk"))
        case ast.Attribute(_, "open"):
            return not _only_reads([*call.args[:1], *modes])
        case ast.Attribute(_, name):
            return name in _METHODS
    return False


def _only_reads(modes: list[ast.expr]) -> bool:
    return all(isinstance(mode, ast.Constant) and mode.value in _READS for mode in modes)
