from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness.trial.shared_results import SharedResults
from tests.harness.composing import experiment_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    numbers: tuple[float, ...]


_FOUND = Found(numbers=(0.1, 2.0))
_LINE = "mesh=tp2"


def _once(
    folder: Path,
    find: Callable[[], Found | None],
    line: str = _LINE,
    *,
    kind: str = "twin",
    rank: int = 0,
    others_know: bool = True,
) -> Found | None:
    def earliest(step: int | None) -> int | None:
        return step if others_know else 0

    shared = SharedResults(folder=folder, rank=rank, device=torch.device("cpu"), earliest=earliest)
    return shared.once(kind, Found, experiment_of(line), find)


def _counting(found: Found | None) -> tuple[list[None], Callable[[], Found | None]]:
    calls: list[None] = []

    def find() -> Found | None:
        calls.append(None)
        return found

    return calls, find


@pytest.mark.parametrize(
    ("line", "count"),
    [
        pytest.param(_LINE, 1, id="the same"),
        pytest.param(f"{_LINE} ac=full", 2, id="another variant"),
        pytest.param(f"{_LINE} ac=selective_layer ac.ac_freq=3", 2, id="another option"),
        pytest.param(f"{_LINE} seed=1", 2, id="another seed"),
        pytest.param(f"{_LINE} dtype=bf16", 2, id="another dtype"),
        pytest.param(f"{_LINE} batch_size=16", 2, id="another batch"),
        pytest.param(f"{_LINE} data=synthetic", 2, id="other data"),
        pytest.param(f"{_LINE} optimizer=sgd", 2, id="another optimizer"),
        pytest.param(f"{_LINE} protocol.parity_steps=4", 2, id="another number of steps"),
        pytest.param("mesh=shard2_tp2", 2, id="another mesh"),
    ],
)
def test_what_is_the_same_is_found_once(tmp_path: Path, line: str, count: int) -> None:
    calls, find = _counting(_FOUND)
    for each in (_LINE, line):
        assert _once(tmp_path, find, each) == _FOUND
    assert len(calls) == count


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        pytest.param("harness.trial.shared_results.environment_id", lambda _: "other", id="environment"),
        pytest.param("torch.get_num_threads", lambda: 97, id="threads"),
    ],
)
def test_what_is_found_elsewhere_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, value: Callable[..., object]
) -> None:
    calls, find = _counting(_FOUND)
    _once(tmp_path, find)
    monkeypatch.setattr(changed, value)
    _once(tmp_path, find)
    assert len(calls) == 2


def test_another_kind_is_another_result(tmp_path: Path) -> None:
    calls, find = _counting(_FOUND)
    for kind in ("twin", "dense"):
        _once(tmp_path, find, kind=kind)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("rank", "others_know"),
    [pytest.param(1, True, id="this rank does not know"), pytest.param(0, False, id="another does not")],
)
def test_ranks_find_together_or_not_at_all(tmp_path: Path, rank: int, others_know: bool) -> None:
    calls, find = _counting(_FOUND)
    _once(tmp_path, find)
    _once(tmp_path, find, rank=rank, others_know=others_know)
    assert len(calls) == 2


def test_what_is_torn_is_found_again(tmp_path: Path) -> None:
    calls, find = _counting(_FOUND)
    _once(tmp_path, find)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-2])
    assert _once(tmp_path, find) == _FOUND
    assert len(calls) == 2


def test_what_was_not_found_or_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    calls, find = _counting(None)
    assert _once(tmp_path, find) is None
    assert not list(tmp_path.iterdir())
    assert _once(tmp_path / "missing", lambda: _FOUND) == _FOUND
    assert len(calls) == 1
