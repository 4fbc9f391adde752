"""A module with a strategy is a variant, one without is what variants are built from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from strategies import Strategy, variants

_STRATEGY = "from strategies.base import Strategy\nclass {name}(Strategy):\n    pass\n"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ModuleType]:
    package = ModuleType("a_group")
    package.__path__ = [str(tmp_path)]
    sys.modules["a_group"] = package
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "a_group"]:
        del sys.modules[name]


def test_modules_with_a_strategy_are_variants(group: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text(_STRATEGY.format(name="Second"), "utf-8")
    (tmp_path / "first.py").write_text(_STRATEGY.format(name="First"), "utf-8")
    (tmp_path / "parts.py").write_text("from a_group.first import First\n", "utf-8")
    assert {name: found.__name__ for name, found in variants(group, Strategy).items()} == {
        "first": "First",
        "second": "Second",
    }


def test_two_strategies_in_a_module_are_refused(group: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(_STRATEGY.format(name="A") + _STRATEGY.format(name="B"), "utf-8")
    with pytest.raises(TypeError) as error:
        variants(group, Strategy)
    assert str(error.value) == "a_group.twice: must define one Strategy at most, found 2"
