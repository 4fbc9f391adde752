"""Torch's own attention over parts of sequences, by kernels of CUDA: one part on one GPU, two on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ranks.agent import Agent
from harness.ranks.start import RankJob
from tests.gpu.devices import CUDA, IS_REHEARSED

_FEW = torch.cuda.device_count() < 2 and not IS_REHEARSED
_ROWS = [
    pytest.param(dtype, ranks, marks=pytest.mark.skipif(ranks > 1 and _FEW, reason="needs two CUDA devices"))
    for dtype in ("float32", "bfloat16")
    for ranks in (1, 2)
]
_MOST = {"float32": 1e-5, "bfloat16": 2e-2}
"""Differences over the largest value: kernels differ in the order in which they add up."""


def errors(agent: Agent, folder: Path, *, dtype: str, ranks: int, device: str) -> list[float]:
    job = RankJob(
        trial_dir=folder,
        entry="tests.gpu.rank_entries:attend_over_parts",
        payload=dtype,
        ranks=ranks,
        deadline_s=120,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
    )
    outcome = agent.run(job)
    assert outcome.error is None, outcome.error.message
    results: list[dict[str, Any]] = list(outcome.results)
    return [each for result in results for each in result["errors"]]


def test_two_parts_attend_as_the_whole_on_the_cpu(agent: Agent, tmp_path: Path) -> None:
    assert max(errors(agent, tmp_path, dtype="float32", ranks=2, device="cpu")) < _MOST["float32"]


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize(("dtype", "ranks"), _ROWS)
def test_parts_attend_as_the_whole(agent: Agent, tmp_path: Path, dtype: str, ranks: int, device: str) -> None:
    assert max(errors(agent, tmp_path, dtype=dtype, ranks=ranks, device=device)) < _MOST[dtype]
