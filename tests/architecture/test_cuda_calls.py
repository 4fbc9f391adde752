"""Code that only a GPU runs calls functions that torch has, with arguments that they take."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
MODULES = ("torch.cuda.", "torch.backends.cuda.", "torch.random.", "torch.accelerator.")
UNCHECKED = object()
"""Stands for the value of an argument."""


def _uses() -> Iterator[tuple[str, str, ast.Call | None]]:
    """Yield place, and dotted name of each use of `MODULES`, with its call if it is called."""
    for folder in ("harness", "strategies", "bench", "tests/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            if not any(module in text for module in MODULES):
                continue
            tree = ast.parse(text)
            calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
            for node in ast.walk(tree):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                if isinstance(node, ast.Attribute) and name.startswith(MODULES) and "(" not in name:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", name, calls.get(id(node))


USES = list(_uses())


def test_there_are_such_uses() -> None:
    assert len(USES) > 30


@pytest.mark.parametrize(
    ("name", "call"), [pytest.param(name, call, id=f"{place} {name}") for place, name, call in USES]
)
def test_torch_has_it_and_takes_the_arguments(name: str, call: ast.Call | None) -> None:
    found: Any = reduce(getattr, name.split(".")[1:], torch)
    if call is None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    function = found.__new__ if inspect.isclass(found) and "__new__" in vars(found) else found
    arguments = [UNCHECKED] * (len(call.args) + (function is not found))
    named = {keyword.arg: UNCHECKED for keyword in call.keywords if keyword.arg is not None}
    inspect.signature(function).bind(*arguments, **named)
