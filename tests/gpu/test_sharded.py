"""FSDP over a group of one rank: NCCL, unsharding, and every variant below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.experiment.mesh import Mesh
from harness.ranks.agent import Agent
from harness.ranks.start import RankJob
from harness.records.parity_result import PARTS
from strategies import ac_variants
from tests.gpu.devices import CUDA
from tests.gpu.rank_entries import Sharded
from tests.parity import cases

ON_CPU_TOO = [(fsdp, variant) for fsdp in ("fsdp1", "fsdp2") for variant in ("full", "offload")]


def unequal_parts(agent: Agent, folder: Path, *, fsdp: str, variant: str, device: str) -> list[str]:
    experiment = cases.experiment(variant=variant, model="llama", dropout=0.1, mesh=Mesh(device=device))
    job = RankJob(
        trial_dir=folder,
        entry="tests.gpu.rank_entries:prove_sharded",
        payload=Sharded(experiment=experiment, fsdp=fsdp),
        ranks=1,
        deadline_s=120,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
    )
    outcome = agent.run(job)
    assert outcome.error is None, outcome.error.message
    return [part for part in PARTS if not outcome.results[0][part]["equal"]]


@pytest.mark.parametrize(("fsdp", "variant"), ON_CPU_TOO)
def test_gloo_group_of_one_is_bitwise_neutral(agent: Agent, tmp_path: Path, fsdp: str, variant: str) -> None:
    assert unequal_parts(agent, tmp_path, fsdp=fsdp, variant=variant, device="cpu") == []


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("fsdp", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("variant", ac_variants)
def test_nccl_group_of_one_is_bitwise_neutral(
    agent: Agent, tmp_path: Path, fsdp: str, variant: str, device: str
) -> None:
    assert unequal_parts(agent, tmp_path, fsdp=fsdp, variant=variant, device=device) == []
