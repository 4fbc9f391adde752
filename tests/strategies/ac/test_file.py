"""file: what is run, how it is proven and measured, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies import StrategyError
from strategies.ac.file import File
from strategies.ac.full import Full
from strategies.written.file_text import recomputing_file
from strategies.written.loaded_file import MOST_BYTES
from tests.strategies.meters import measure
from tests.strategies.toys import differences, toy, train_step

BLOCKS = [f"layers.{number}" for number in range(3)]


@pytest.fixture
def full_file(tmp_path: Path) -> str:
    path = tmp_path / "apply_full.py"
    path.write_text(recomputing_file(BLOCKS, title="Full.", name="apply_full"), encoding="utf-8")
    return str(path)


def test_a_file_costs_what_its_variant_costs(full_file: str) -> None:
    measured: list[Any] = []
    for strategy in (Full(layers_fqn="layers"), File(path=full_file)):
        model = strategy.apply(toy())
        train_step(model)
        measured.append(measure(model, torch.arange(8).view(2, 4)))
    assert measured[0] == measured[1]


def test_the_model_may_be_changed_in_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def apply(model):\n    model.seen = True\n", encoding="utf-8")
    model = toy()
    assert File(path=str(path)).apply(model) is model
    assert differences(train_step(toy()), train_step(model)) == []


def test_a_second_application_is_refused(full_file: str) -> None:
    model = File(path=full_file).apply(toy())
    for strategy in (File(path=full_file), Full(layers_fqn="layers")):
        with pytest.raises(StrategyError) as error:
            strategy.apply(model)
        assert str(error.value) == "ac: 'Toy' is already checkpointed; apply one variant to a model"


def test_a_file_for_another_model_is_refused(full_file: str) -> None:
    with pytest.raises(StrategyError) as error:
        File(path=full_file).apply(toy("module_dict"))
    assert str(error.value) == (
        f"ac.path: {full_file!r}: apply_full was written for another model than this Toy: "
        "3 of 3 blocks are missing, 'layers.0' is the first"
    )


def test_a_name_is_needed() -> None:
    with pytest.raises(StrategyError) as error:
        File()
    assert str(error.value) == (
        "ac.path: is empty; give a file with `apply(model)`, as show=file prints one, or with a plan"
    )


REFUSED: dict[str, tuple[bytes | None, str]] = {
    "nothing there": (None, "cannot be read: No such file or directory"),
    "no function": (
        b"def use(model): ...\n",
        "has no function `apply` or `policy_fn`; write `def apply(model)` in it",
    ),
    "no function, but a value": (
        b"apply = 3\n",
        "has no function `apply` or `policy_fn`; write `def apply(model)` in it",
    ),
    "no Python": (b"def apply(", "cannot be imported: SyntaxError: '(' was never closed ({name}, line 1)"),
    "an error": (b"raise KeyError(3)", "cannot be imported: KeyError: 3"),
    "an exit": (b"raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    "no text": (b"\xff\xfe\x00", "is no text in UTF-8; give a text in UTF-8"),
    "too large": (b"#" * (MOST_BYTES + 1), "cannot be read: it is larger than 1 MiB"),
}


@pytest.mark.parametrize(("content", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_file_with_a_function_is_refused(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StrategyError) as error:
        File(path=str(path)).apply(toy())
    assert str(error.value) == f"ac.path: {str(path)!r} {problem.format(name=path.name)}"


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(StrategyError) as error:
            File(path=str(path)).apply(toy())
        assert str(error.value) == f"ac.path: {str(path)!r} cannot be read: it is no plain file"


def test_a_file_that_has_changed_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def apply(model): ...\n", encoding="utf-8")
    before = File(path=str(path))
    assert before.digest == "420834c056fd5a55"
    assert File(path=str(path), digest=before.digest) == before
    path.write_text("def apply(model): return model\n", encoding="utf-8")
    assert File(path=str(path)) != before
    with pytest.raises(StrategyError) as error:
        File(path=str(path), digest=before.digest)
    assert str(error.value) == (
        f"ac.digest: is {before.digest!r}, and {str(path)!r} has {File(path=str(path)).digest!r}; "
        "the file has changed, or leave the digest out"
    )


def test_compiled_code_is_refused(full_file: str) -> None:
    with pytest.raises(StrategyError) as error:
        File(path=full_file).check_compilation("ac_first", "blocks")
    assert str(error.value) == "compile: ac=file is for what runs eagerly; use compile=none"
