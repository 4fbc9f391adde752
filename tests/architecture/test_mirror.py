"""Tests mirror the rooms: a module has a test file of its name, or a line says which test examines it."""

from __future__ import annotations

from pathlib import Path

from tests.architecture.examined_by import EXAMINED_BY

ROOT = Path(__file__).parents[2]
PACKAGES = ("harness", "strategies", "hydra_plugins")


def _modules() -> list[str]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py"]


def _own_test(module: str) -> Path:
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.name}"


def test_every_module_is_examined() -> None:
    missing = [each for each in _modules() if not _own_test(each).is_file() and each not in EXAMINED_BY]
    assert missing == [], "give each a test file, or a line in tests/architecture/examined_by.py"


def test_the_lines_are_true() -> None:
    modules = _modules()
    assert [each for each in EXAMINED_BY if each not in modules] == [], "there is no such module"
    assert [each for each in EXAMINED_BY if _own_test(each).is_file()] == [], "it has a test file of its own"
    assert [test for test in EXAMINED_BY.values() if not (ROOT / test).is_file()] == [], (
        "there is no such test"
    )
