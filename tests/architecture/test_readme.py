"""The README tells the truth: its generated parts are current and its example variant works as printed."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from omegaconf import OmegaConf

from docs.tools.readme import nested_table, variant_table
from strategies.ac.base import Recomputing
from strategies.regions.region import regions
from tests.parity.cases import MODELS

_TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def _block(language: str, start: str) -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", _TEXT, re.DOTALL)
    return next(code for code in blocks if code.startswith(start))


@pytest.fixture
def last_blocks(monkeypatch: pytest.MonkeyPatch) -> type[Recomputing]:
    module = ModuleType("last_blocks")
    monkeypatch.setitem(sys.modules, "last_blocks", module)  # dataclasses look their module up
    exec(compile(_block("python", '"""`ac=last_blocks`'), "README.md", "exec"), vars(module))
    variant: type[Recomputing] = vars(module)["LastBlocks"]
    return variant


def test_variant_table_is_current() -> None:
    assert variant_table() in _TEXT, "run python -m docs.tools.readme"


def test_table_of_nested_regions_is_the_kept_result() -> None:
    assert nested_table() in _TEXT, "run python -m docs.tools.readme"


def test_table_of_the_demo_stands_in_the_first_screen() -> None:
    first_screen = _TEXT.splitlines()[:25]
    assert "make demo" in "\n".join(first_screen)
    assert any(line.startswith("| variant | mesh | verdict |") for line in first_screen)


def test_example_variant_is_complete(last_blocks: type[Recomputing]) -> None:
    written = OmegaConf.create(_block("yaml", "name: last_blocks"))
    assert list(written) == ["name", *(field.name for field in fields(last_blocks))]


def test_example_variant_works(last_blocks: type[Recomputing]) -> None:
    with torch.device("meta"):
        model = last_blocks(layers_fqn="layers").apply(MODELS["gpt"].build())
    assert list(regions(model)) == ["layers.0"]
