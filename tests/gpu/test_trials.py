"""Whole trials on the GPU, through agent and record; one of them on the CPU too, which tests the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.trials import records
from harness.experiment.mesh import Mesh
from harness.experiment.protocol import Protocol
from harness.ranks.agent import Agent
from harness.records.parity_result import PARTS
from harness.records.record import Record
from strategies import ac_variants
from tests.gpu.devices import CUDA, DEVICES
from tests.parity import cases


def trial(
    agent: Agent, folder: Path, *, device: str, model: str, variant: str, timed_pairs: int = 0, **recipe: Any
) -> Record:
    experiment = cases.experiment(
        model=model, variant=variant, mesh=Mesh(device=device), dropout=0.1, **recipe
    )
    protocol = Protocol(parity_steps=3, warmup_steps=1, timed_pairs=timed_pairs)
    (record,) = records(agent, [replace(experiment, protocol=protocol)], folder)
    assert record.error is None, record.error.message
    return record


def unequal_parts(record: Record) -> list[str]:
    assert record.parity is not None
    return [part for part in PARTS if not getattr(record.parity, part).equal]


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("model", ["gpt", "llama", "moe"])
@pytest.mark.parametrize("variant", ac_variants)
def test_is_bitwise_neutral_on_the_gpu(
    agent: Agent, tmp_path: Path, model: str, variant: str, device: str
) -> None:
    record = trial(agent, tmp_path, device=device, model=model, variant=variant)
    assert unequal_parts(record) == []
    assert record.verdict == "neutral"


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", ["bf16", "bf16_mixed"])
@pytest.mark.parametrize("variant", ac_variants)
def test_is_bitwise_neutral_in_bf16(
    agent: Agent, tmp_path: Path, dtype: str, variant: str, device: str
) -> None:
    record = trial(agent, tmp_path, device=device, model="llama", variant=variant, dtype=dtype)
    assert unequal_parts(record) == []


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_bytes_lie_in_host_memory_and_not_on_the_device(
    agent: Agent, tmp_path: Path, device: str
) -> None:
    record = trial(agent, tmp_path, device=device, model="mlp", variant="offload")
    assert record.work is not None
    assert record.memory is not None
    assert record.memory.baseline is not None
    assert unequal_parts(record) == []
    assert 0 < record.work.offloaded_bytes <= record.memory.host_peak_bytes
    assert record.memory.saved_bytes < record.memory.baseline.saved_bytes


@pytest.mark.parametrize("device", [CUDA])
def test_a_record_says_which_gpu_and_what_it_took(agent: Agent, tmp_path: Path, device: str) -> None:
    record = trial(agent, tmp_path, device=device, model="gpt", variant="full", timed_pairs=6)
    assert {"device", "driver", "cuda", "foreign_processes"} <= record.environment.keys()
    assert record.memory is not None
    assert record.memory.allocator is not None
    assert record.time is not None
    assert record.time.step_time_s.median > 0
    if device == "cuda":
        assert record.environment["device"] == torch.cuda.get_device_name(0)
        assert record.environment["driver"]
        assert record.memory.allocator.source == "cuda caching allocator"
