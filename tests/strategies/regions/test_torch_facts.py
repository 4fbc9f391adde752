from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.regions import torch_facts
from strategies.regions.torch_facts import parameter_groups, selective_takes_hooks


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


class Unit:
    """An FSDP2 unit of a torch release."""

    def __init__(self, **state: Any) -> None:
        self._get_fsdp_state = lambda: SimpleNamespace(**state)


UNITS = {
    "several groups": (Unit(_fsdp_param_groups=("a", "b")), ["a", "b"]),
    "none of several": (Unit(_fsdp_param_groups=()), []),
    "one group": (Unit(_fsdp_param_group="a"), ["a"]),
    "none of one": (Unit(_fsdp_param_group=None), []),
}


@pytest.mark.parametrize(("unit", "expected"), UNITS.values(), ids=UNITS)
def test_groups_of_every_release_are_found(unit: Any, expected: list[str]) -> None:
    assert list(parameter_groups(unit)) == expected
