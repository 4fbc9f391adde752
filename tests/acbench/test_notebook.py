"""The notebook of the documentation runs, and shows what its cells give."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

_NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
_CELLS = json.loads(_NOTEBOOK.read_text(encoding="utf-8"))["cells"]
_CODE = ["".join(cell["source"]) for cell in _CELLS if cell["cell_type"] == "code"]


def _shown(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    names: dict[str, Any] = {}
    shown = [_shown(source, names) for source in _CODE]
    tables = [each for each in shown if hasattr(each, "_repr_html_")]
    assert len(tables) == 2
    kept = [
        "".join(output["data"]["text/plain"])
        for cell in _CELLS
        for output in cell.get("outputs", ())
        if "data" in output
    ]
    assert [str(each).split()[0] for each in tables] == [each.split()[0] for each in kept]


def test_the_notebook_is_small() -> None:
    assert _NOTEBOOK.stat().st_size < 20_000
