"""The source says things in the words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("acbench", "harness", "hydra_plugins", "strategies")
FIRST = frozenset({"How", "What", "Where", "Whether", "Which", "Who"})
"""Words that begin no docstring: it begins with a verb, or with a noun of the field."""

INSTEAD = {
    r"replay(s|ed|ing)?": "recompute, or run again",
    r"gradient checkpointing": "activation checkpointing",
    r"utilis\w+": "use",
    r"basically|simply|obviously": "nothing",
}
"""Words of prose, and what stands for them; names of other people's options are quoted."""


def _sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from filter(None, [ast.get_docstring(node, clean=False)])


def _prose(source: str) -> Iterator[str]:
    """Yield docstrings and comments, without what is quoted in them."""
    comments = (
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    for text in (*_docstrings(source), *comments):
        yield re.sub(r"`[^`]*`|\"[^\"]*\"", "", text)


def _faults(source: str) -> list[str]:
    begun = [text.split()[0] for text in _docstrings(source) if text.split()[0] in FIRST]
    here = [word for word in INSTEAD if _has(source, word)]  # few sources, and only their prose is told apart
    words = [word for text in (_prose(source) if here else ()) for word in here if _has(text, word)]
    return begun + words


def _has(text: str, word: str) -> bool:
    return re.search(rf"\b({word})\b", text, re.IGNORECASE) is not None


def test_docstrings_and_comments() -> None:
    found = {str(path.relative_to(ROOT)): _faults(path.read_text(encoding="utf-8")) for path in _sources()}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""What is meant."""',
        "def f():\n    '''Whether it is.'''",
        "# a replayed forward",
        "# as usual, simply",
    ],
)
def test_a_fault_is_found(source: str) -> None:
    assert _faults(source)


@pytest.mark.parametrize("source", ['"""Facts."""', "# torch calls it `replay`", 'x = "replayed"'])
def test_other_words_are_none(source: str) -> None:
    assert not _faults(source)
