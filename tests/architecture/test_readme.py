"""The pages tell the truth: their generated parts are current, their example variant works as printed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from omegaconf import OmegaConf

from docs.tools.readme import PARTS, use_list, variant_table
from strategies.ac.base import Recomputing
from strategies.regions.region import regions
from tests.parity.cases import MODELS

_ROOT = Path(__file__).parents[2]
_TEXT = (_ROOT / "README.md").read_text(encoding="utf-8")
_VARIANT_PAGE = (_ROOT / "docs" / "adding_a_strategy.md").read_text(encoding="utf-8")
_MOST_LINES, _MOST_COLUMNS = 130, 110


def _block(language: str, start: str) -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", _VARIANT_PAGE, re.DOTALL)
    return next(code for code in blocks if code.startswith(start))


@pytest.fixture
def last_blocks(monkeypatch: pytest.MonkeyPatch) -> type[Recomputing]:
    module = ModuleType("last_blocks")
    monkeypatch.setitem(sys.modules, "last_blocks", module)  # dataclasses look their module up
    exec(compile(_block("python", '"""`ac=last_blocks`'), "adding_a_strategy.md", "exec"), vars(module))
    variant: type[Recomputing] = vars(module)["LastBlocks"]
    return variant


@pytest.mark.parametrize(
    ("page", "content"),
    [pytest.param(page, content, id=f"{mark} of {page}") for _, page, mark, content in PARTS],
)
def test_generated_parts_are_current(page: str, content: Callable[[], str]) -> None:
    assert content() in (_ROOT / page).read_text(encoding="utf-8"), "run python -m docs.tools.readme"


def test_every_variant_says_when_to_use_it_and_what_it_costs() -> None:
    rows = [line.split(" | ") for line in (*variant_table().splitlines()[2:], *use_list().split("\n* "))]
    assert [
        row for row in rows if not all(cell.strip(" |") for cell in row) or row[0].endswith("when ")
    ] == []


def test_the_readme_is_short() -> None:
    lines = _TEXT.splitlines()
    assert len(lines) <= _MOST_LINES
    assert [line for line in lines if len(line) > _MOST_COLUMNS] == []


def test_the_answer_stands_in_the_first_screen() -> None:
    first_screen = _TEXT.splitlines()[:25]
    assert any(line.startswith("$ acbench-fit ") for line in first_screen)
    assert any(line.startswith("USE ") for line in first_screen)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_first_screen_is_what_its_commands_print(tmp_path: Path) -> None:
    shutil.copy(_ROOT / "examples" / "my_models.py", tmp_path)
    console = re.search(
        r"\n\$ (acbench-fit .*?)\n(.*?)\n\$ (python .*?)  +#.*?\n(.*?)\n```", _TEXT, re.DOTALL
    )
    assert console is not None
    for command, printed in (console.groups()[:2], console.groups()[2:]):
        words = [str(Path(sys.executable).parent / command.split()[0]), *command.split()[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert printed in done.stdout


def test_example_variant_is_complete(last_blocks: type[Recomputing]) -> None:
    written = OmegaConf.create(_block("yaml", "name: last_blocks"))
    assert list(written) == ["name", *(field.name for field in fields(last_blocks))]


def test_example_variant_works(last_blocks: type[Recomputing]) -> None:
    with torch.device("meta"):
        model = last_blocks(layers_fqn="layers").apply(MODELS["gpt"].build())
    assert list(regions(model)) == ["layers.0"]
