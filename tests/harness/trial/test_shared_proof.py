from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.records.parity_result import Parity, PartParity
from harness.trial.links import chain
from harness.trial.shared_proof import SharedProof
from tests.harness.composing import experiment_of

_FOUND = Parity(
    level="tolerance",
    steps=2,
    losses=(1.0, 0.5),
    outputs=PartParity(max_rel=1e-6),
    loss=PartParity(),
    gradients=PartParity(),
    rng_state=PartParity(),
    buffers=PartParity(),
    parameters=PartParity(),
)


def _proof(folder: Path, rank: int = 0, *, others_know: bool = True) -> SharedProof:
    def earliest(step: int | None) -> int | None:
        return step if others_know else 0

    return SharedProof(folder=folder, rank=rank, device=torch.device("cpu"), earliest=earliest)


def _counting(found: Parity | None) -> tuple[list[None], Callable[[], Parity | None]]:
    calls: list[None] = []

    def compare() -> Parity | None:
        calls.append(None)
        return found

    return calls, compare


@pytest.mark.parametrize(
    ("line", "count"),
    [
        pytest.param("mesh=tp2", 1, id="the same trial"),
        pytest.param("mesh=tp2 ac=full shard=megatron dtype=bf16 protocol=bench", 1, id="another variant"),
        pytest.param("mesh=tp2 seed=1", 2, id="another seed"),
        pytest.param("mesh=shard2_tp2", 2, id="another mesh"),
    ],
)
def test_what_all_variants_share_is_compared_once(tmp_path: Path, line: str, count: int) -> None:
    calls, compare = _counting(_FOUND)
    for each in ("mesh=tp2 ac=none", line):
        assert _proof(tmp_path)(chain(experiment_of(each))[-1], compare) == _FOUND
    assert len(calls) == count


@pytest.mark.parametrize(
    ("rank", "others_know"),
    [pytest.param(1, True, id="this rank does not know"), pytest.param(0, False, id="another does not")],
)
def test_ranks_compare_together_or_not_at_all(tmp_path: Path, rank: int, others_know: bool) -> None:
    calls, compare = _counting(_FOUND)
    link = chain(experiment_of("mesh=tp2"))[-1]
    _proof(tmp_path)(link, compare)
    _proof(tmp_path, rank, others_know=others_know)(link, compare)
    assert len(calls) == 2


def test_what_was_not_found_or_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    link = chain(experiment_of("mesh=tp2"))[-1]
    calls, compare = _counting(None)
    assert _proof(tmp_path)(link, compare) is None
    assert not list(tmp_path.iterdir())
    assert _proof(tmp_path / "missing")(replace(link), lambda: _FOUND) == _FOUND
    assert len(calls) == 1
