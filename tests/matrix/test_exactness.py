"""Two meters of memory on one step: live storages against the bytes requested from the allocator.

The allocator is the counting CPU allocator, or torch's caching allocator on a GPU. Where the allocator's peak
is higher, kernels hold memory of their own; a third run watches each operator and names them. Nothing is left
then. With few tokens the peak lies in the optimizer; batch normalisation has a kernel whose memory raises the
peak in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.trials import UNBUDGETED, experiments
from harness.experiment.data import source_of
from harness.experiment.experiment import Experiment
from harness.measure.memory.counting_allocator import counting_allocator
from harness.measure.step import allocator_truth, instrument
from harness.trial.assemble import assemble
from strategies.step.live_storages import WorkspaceProbe
from tests.harness.measure.memory.workspace_probe import CpuWorkspaceProbe
from tests.matrix.models import SEQUENCE_LENGTH, VOCABULARY

MODELS = {name: f"model={name}" for name in ("mlp", "gpt_nano", "llama_nano", "moe_nano", "hf")} | {
    "mlp, 16 tokens": "model=mlp sequence_length=16",
    "gpt_nano, 16 tokens": "model=gpt_nano sequence_length=16",
    "batch_norm": (
        f"model=python model.factory=tests.matrix.models:batch_norm model.vocab_size={VOCABULARY}"
        " model.cast_buffers=true"
    ),
}
CUDA_MODELS = ("mlp", "gpt_nano", "llama_nano", "moe_nano")
SIZES = f"data=synthetic batch_size=4 sequence_length={SEQUENCE_LENGTH}"
INEXACT = {"cpu": (), "cuda": ("offload",)}
"""Variants whose freed blocks the allocator of a device still counts for a while.

Copies run on a stream of their own, and the allocator counts a block that another stream has used until it
has seen that stream's event, after the last storage on it is gone (`free_block` in
c10/cuda/CUDACachingAllocator.cpp).
"""

UNSEEN = {"nested": (0, 2 * 5056, 3 * 5056)}
"""States of the CPU's generator that a region holds while it is recomputed: 5,056 unseen bytes each."""


class CudaWorkspaceProbe:
    """Tells an operator's private memory from the caching allocator's numbers."""

    def __init__(self) -> None:
        self._before_bytes = 0

    def begin(self) -> None:
        """Start to watch."""
        torch.cuda.reset_peak_memory_stats()
        self._before_bytes = _requested("current")

    def excess_bytes(self) -> int:
        """Return the bytes that were requested above both what was there at `begin` and what is there now."""
        return _requested("peak") - max(self._before_bytes, _requested("current"))


@pytest.fixture
def new_probe(device: str) -> Callable[[], WorkspaceProbe]:
    """Return what makes a probe of the device's allocator."""
    if device == "cuda":
        return CudaWorkspaceProbe
    allocator = counting_allocator()
    if allocator is None or not allocator.install():
        pytest.skip("there is no C++ compiler for the counting allocator")
    return partial(CpuWorkspaceProbe, allocator)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["math", "fused"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_no_byte_is_unexplained(
    new_probe: Callable[[], WorkspaceProbe], device: str, model: str, dtype: str, attention: str
) -> None:
    if device == "cuda" and model not in CUDA_MODELS:
        pytest.skip("a model of the CPU")
    dropout = 0.0 if (device, attention) == ("cpu", "fused") else 0.1  # the CPU's fused kernel has none
    common = f"{SIZES} {MODELS[model]} mesh.device={device} dtype={dtype} model.dropout={dropout}".split()
    around = sdpa_kernel(SDPBackend.MATH) if attention == "math" else nullcontext()
    with around:
        left = {
            ac: _unexplained_bytes(new_probe(), experiment)
            for ac, experiment in zip(
                UNBUDGETED, experiments([*common, f"ac={ac}"] for ac in UNBUDGETED), strict=True
            )
            if ac not in INEXACT[device]
        }
    assert {ac: nbytes for ac, nbytes in left.items() if nbytes not in UNSEEN.get(ac, (0,))} == {}


def _unexplained_bytes(probe: WorkspaceProbe, experiment: Experiment) -> int:
    """Return what the allocator's peak has beside live storages and operators' own memory."""
    is_cuda = experiment.mesh.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    source = source_of(experiment.model, experiment.data, sequence_length=experiment.sequence_length)
    batch = source.batch(step=0, batch_size=experiment.batch_size, seed=experiment.seed).to(device)
    trainee = assemble(experiment, device, None, batch)
    trainee.zero_grad()  # in the first step libraries and the optimizer allocate what stays
    trainee.backward(trainee.forward(batch)[1])
    trainee.update()
    report = instrument(trainee, batch)
    truth = allocator_truth(trainee, batch, report.live)
    probed = instrument(trainee, batch, probe=probe)
    assert truth is not None
    assert probed.workspaces is not None
    return truth.peak_requested_bytes - probed.workspaces.peak_bytes


def _requested(when: str) -> int:
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["requested_bytes"]["all"][when])
