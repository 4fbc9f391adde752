from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strategies.regions import torch_facts
from strategies.regions.torch_facts import selective_takes_hooks


def _of_2_13(function: Any, *, context_fn: Any) -> None: ...


def _of_2_14(function: Any, *, context_fn: Any, respect_saved_tensors_hooks: bool | None = None) -> None: ...


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    selective_takes_hooks.cache_clear()
    yield
    selective_takes_hooks.cache_clear()


@pytest.mark.parametrize(
    ("checkpoint", "takes"),
    [pytest.param(_of_2_13, False, id="torch 2.13"), pytest.param(_of_2_14, True, id="torch 2.14")],
)
def test_whether_checkpoint_asks_about_hooks(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., None], *, takes: bool
) -> None:
    monkeypatch.setattr(torch_facts, "checkpoint", checkpoint)
    assert selective_takes_hooks() is takes
