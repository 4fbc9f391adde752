"""Tests mirror the rooms: a module has a test file of its name, or a line says which test examines it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.architecture.examined_by import EXAMINED_BY, EXAMINED_BY_RUNNING

ROOT = Path(__file__).parents[2]
LINES = EXAMINED_BY | EXAMINED_BY_RUNNING
PACKAGES = ("acbench", "harness", "strategies", "hydra_plugins")


@cache
def _modules() -> tuple[str, ...]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py")


def _own_test(module: str) -> Path:
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.name}"


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


@cache
def _public_names(module: str) -> frozenset[str]:
    """Return the names that a module defines for others, and its own."""
    defined = {
        node.name
        for node in _tree(module).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    constants = {
        target.id
        for node in _tree(module).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    }
    return frozenset(defined | constants | {Path(module).stem})


@cache
def _imported(module: str) -> frozenset[str]:
    """Return the modules that a module imports, as paths."""
    names = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(f"{name.replace('.', '/')}.py" for name in names)


def mentions(test: str, module: str) -> int:
    """Return how many names of a module, or else of users at most three imports away, a test has."""
    words = set(re.findall(r"\w+", (ROOT / test).read_text(encoding="utf-8")))
    users = {module}
    for _ in range(4):
        found = sum(bool(words & _public_names(each)) for each in users)
        if found:
            return found
        users = {each for each in _modules() if _imported(each) & users}
    return 0


def test_every_module_is_examined() -> None:
    missing = [each for each in _modules() if not _own_test(each).is_file() and each not in LINES]
    assert missing == [], "give each a test file, or a line in tests/architecture/examined_by.py"


def test_the_lines_are_true() -> None:
    modules = _modules()
    assert [each for each in LINES if each not in modules] == [], "there is no such module"
    assert [each for each in LINES if _own_test(each).is_file()] == [], "it has a test file of its own"
    assert [test for test in LINES.values() if not (ROOT / test).is_file()] == [], "there is no such test"


def test_the_tests_named_use_what_they_examine() -> None:
    assert [module for module, test in EXAMINED_BY.items() if not mentions(test, module)] == []
