"""Allocator truth, and that live storages tell it to the byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.measure.memory import allocator
from harness.measure.memory import counting_allocator as counting
from harness.measure.memory.allocator import LiveTotals
from harness.measure.memory.counting_allocator import CountingAllocator, counting_allocator
from harness.measure.step import StepReport, allocator_truth, instrument
from harness.models.base import Batch
from harness.records.measured import Allocator
from tests.gpu.devices import CUDA
from tests.harness.measure.memory.workspace_probe import CpuWorkspaceProbe
from tests.harness.measure.metered import REGIONS, Metered, tokens, transformer, warmed
from tests.rank_pool import RankPool

needs_compiler = pytest.mark.skipif(
    counting.build() is None, reason="no C++ compiler for the counting allocator"
)

# a block's parameters, gathered
LARGEST_UNIT_BYTES = 4 * (32 + 32 * 96 + 96 + 32 * 32 + 32 + 32 * 64 + 64 + 64 * 32 + 32)


@pytest.fixture
def counted() -> Iterator[CountingAllocator]:
    counter = counting_allocator()
    assert counter is not None
    assert counter.install()
    yield counter
    counter.uninstall()


@needs_compiler
def test_storages_from_elsewhere_make_no_negative_workspace(counted: CountingAllocator) -> None:
    assert counted.is_installed
    live = LiveTotals(standing_bytes=0, stale_bytes=0, peak_bytes=1 << 40)
    truth = allocator.measure(lambda: None, device="cpu", live=live)
    assert truth is not None
    assert truth.workspace_bytes == 0


@needs_compiler
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["flash attention", "math attention with dropout"])
@pytest.mark.parametrize("region", REGIONS)
def test_live_storages_are_what_the_allocator_hands_out(
    region: str, dropout: float, counted: CountingAllocator
) -> None:
    trainee = transformer(region, dropout=dropout)
    before = counted.read()
    report = instrument(trainee, tokens())
    between = counted.read()
    truth = allocator_truth(trainee, tokens(), report.live)
    after = counted.read()
    assert truth == Allocator(
        source="counting allocator",
        peak_requested_bytes=report.memory.peak_bytes,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        workspace_bytes=0,
        backend_bytes=0,
    )
    # the watched step allocates exactly what the unwatched one does
    assert between.allocations - before.allocations == after.allocations - between.allocations
    assert between.allocated_bytes - before.allocated_bytes == after.allocated_bytes - between.allocated_bytes


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        pytest.param(
            torch.float32, "aten._scaled_dot_product_flash_attention_for_cpu_backward.default", id="flash"
        ),
        pytest.param(torch.bfloat16, "aten.addmm.default", id="bf16 matmul"),
    ],
)
@pytest.mark.parametrize("region", REGIONS)
def test_workspaces_are_named_and_explain_the_rest(
    region: str, dtype: torch.dtype, named: str, counted: CountingAllocator
) -> None:
    trainee = transformer(region, dtype=dtype)
    report = instrument(trainee, tokens(), probe=CpuWorkspaceProbe(counted))
    truth = allocator_truth(trainee, tokens(), report.live)
    assert truth is not None
    assert report.workspaces is not None
    assert truth.peak_requested_bytes == report.workspaces.peak_bytes
    assert truth.workspace_bytes == report.workspaces.peak_bytes - report.memory.peak_bytes
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert named not in report.workspaces.largest_by_op  # such a CPU packs no weights
        return
    assert report.workspaces.largest_by_op[named] > 0


@needs_compiler
def test_a_convolution_is_named(counted: CountingAllocator) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
    batch = Batch(inputs=(torch.ones(2, 3, 16, 16),), targets=None)
    trainee = warmed(Metered(model), batch)
    report = instrument(trainee, batch, probe=CpuWorkspaceProbe(counted))
    truth = allocator_truth(trainee, batch, report.live)
    assert truth is not None
    assert report.workspaces is not None
    assert truth.peak_requested_bytes == report.workspaces.peak_bytes
    named = {op for op, nbytes in report.workspaces.largest_by_op.items() if nbytes > 100}
    assert named == {"aten.convolution.default", "aten.convolution_backward.default"}


@needs_compiler
@pytest.mark.parametrize(
    ("foreach", "workspace_bytes", "named"),
    [
        pytest.param(False, 4, "aten.div.Tensor", id="a promoted number, cast to float"),
        pytest.param(
            True, 12, "aten._foreach_div_.ScalarList", id="a number that the kernel promotes and casts"
        ),
    ],
)
def test_a_peak_in_the_optimizer_is_explained(
    foreach: bool, workspace_bytes: int, named: str, counted: CountingAllocator
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    truth, report = _probed(
        Metered(model, optimizer), Batch(inputs=(torch.ones(2, 64),), targets=None), counted
    )
    assert report.memory.peak_phase == "optimizer"
    assert truth.workspace_bytes == workspace_bytes
    assert report.workspaces is not None
    assert truth.peak_requested_bytes == report.workspaces.peak_bytes
    assert report.workspaces.largest_by_op[named] == workspace_bytes


@needs_compiler
@pytest.mark.parametrize("region", ["none", "full"])
def test_batch_normalisation_is_explained(region: str, counted: CountingAllocator) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = REGIONS[region](block, x) * 0.5
            return x

    truth, report = _probed(Metered(Net()), Batch(inputs=(torch.ones(256, 16),), targets=None), counted)
    assert report.workspaces is not None
    assert truth.peak_requested_bytes == report.workspaces.peak_bytes
    assert report.workspaces.largest_by_op["aten.native_batch_norm.default"] > 0
    assert report.workspaces.largest_by_op["aten.native_batch_norm_backward.default"] > 0


def _probed(trainee: Metered, batch: Batch, counted: CountingAllocator) -> tuple[Allocator, StepReport]:
    """Return what the allocator saw of a step, and what the meter and a probe did."""
    warmed(trainee, batch)
    report = instrument(trainee, batch, probe=CpuWorkspaceProbe(counted))
    truth = allocator_truth(trainee, batch, report.live)
    assert truth is not None
    return truth, report


@needs_compiler
def test_blocks_of_other_threads_are_the_backends(counted: CountingAllocator) -> None:
    before = counted.read()
    counted.count_this_thread(as_model=False)
    theirs = torch.empty(100)
    counted.count_this_thread(as_model=True)
    ours = torch.empty(1000)
    after = counted.read()
    assert after.live_bytes - before.live_bytes == ours.nbytes
    assert after.backend_live_bytes - before.backend_live_bytes == theirs.nbytes
    del theirs
    assert counted.read().backend_live_bytes == before.backend_live_bytes


@needs_compiler
def test_installing_twice_counts_once_and_uninstalling_frees_what_lives(counted: CountingAllocator) -> None:
    assert counted.install()
    before = counted.read()
    block = torch.ones(1000)
    assert counted.read().live_bytes - before.live_bytes == 4000
    counted.uninstall()
    assert not counted.is_installed
    assert torch.equal(block, torch.ones(1000))
    del block
    assert counted.read().live_bytes == before.live_bytes
    unseen = torch.ones(1000)
    assert counted.read().live_bytes == before.live_bytes
    assert unseen.sum() == 1000


@pytest.mark.parametrize("region", ["none", "full"])
def test_without_a_counting_allocator_the_profiler_tells(region: str) -> None:
    trainee = transformer(region)
    with sdpa_kernel(SDPBackend.MATH):
        warmed(trainee, tokens())
        report = instrument(trainee, tokens())
        truth = allocator_truth(trainee, tokens(), report.live)
    assert truth is not None
    assert truth.source == "torch.profiler memory events"
    assert truth.workspace_bytes == 0


def test_a_device_without_allocator_has_no_truth() -> None:
    assert (
        allocator.measure(
            lambda: None, device="meta", live=LiveTotals(standing_bytes=0, stale_bytes=0, peak_bytes=0)
        )
        is None
    )


@needs_compiler
def test_the_library_is_compiled_once_into_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = counting.build()
    assert library is not None
    assert library.parent == tmp_path / "acbench"
    compiled = library.stat().st_mtime_ns
    assert counting.build() == library
    assert library.stat().st_mtime_ns == compiled
    assert list(library.parent.iterdir()) == [library]


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false"], ids=["no compiler", "one that fails"])
def test_without_compiler_there_is_no_library(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    assert counting.build() is None


def test_an_unwritable_cache_gives_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert counting.build() is None


def _sharded(region: str) -> Metered:
    trainee = transformer(region)
    for layer in trainee.blocks.values():
        fully_shard(layer)
    fully_shard(trainee.model)
    sharded = Metered(trainee.model, torch.optim.SGD(trainee.model.parameters(), lr=0.1))
    return warmed(warmed(sharded, tokens()), tokens())


@needs_compiler
@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module:UserWarning"
)  # says what in-place operators would do
@pytest.mark.parametrize("region", REGIONS)
def test_parameters_that_are_sharded_are_counted_to_the_byte(region: str, counted: CountingAllocator) -> None:
    assert counted.is_installed
    # without a backend there is no thread that holds tensors for a while after a collective
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        trainee = _sharded(region)
        report = instrument(trainee, tokens())
        truth = allocator_truth(trainee, tokens(), report.live)
    finally:
        dist.destroy_process_group()
    assert truth is not None
    assert (truth.workspace_bytes, truth.peak_requested_bytes) == (0, report.memory.peak_bytes)
    assert sum(report.memory.peak_parts.values()) == report.memory.peak_bytes
    assert report.memory.peak_parts["unsharded_parameters"] > 0


def _on_gloo(_: int) -> Allocator | None:
    assert allocator.install()
    trainee = _sharded("full")
    report = instrument(trainee, tokens())
    truth = allocator_truth(trainee, tokens(), report.live)
    counter = counting_allocator()
    assert counter is not None
    counter.uninstall()
    return truth


@needs_compiler
def test_gloos_copies_are_the_backends(pool2: RankPool) -> None:
    for truth in pool2.run(_on_gloo):
        assert truth.backend_bytes >= LARGEST_UNIT_BYTES


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("region", ["none", "full"])
def test_cuda_requests_are_live_storages_and_named_workspaces(region: str, device: str) -> None:
    trainee = transformer(region)
    trainee.model.to(device)
    on_cuda = Metered(trainee.model)
    batch = tokens().to(torch.device(device))
    warmed(warmed(on_cuda, batch), batch)
    report = instrument(on_cuda, batch)
    truth = allocator_truth(on_cuda, batch, report.live)
    assert truth is not None
    assert truth.peak_requested_bytes >= report.memory.peak_bytes
    if device == "cpu":
        return
    assert truth.source == "cuda caching allocator"
    assert truth.peak_reserved_bytes is not None
    assert truth.peak_allocated_bytes is not None
    assert truth.peak_requested_bytes <= truth.peak_allocated_bytes <= truth.peak_reserved_bytes


def test_ranks_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    library = counting.build()
    assert library is None or library.parent == Path(os.environ["HOME"]) / ".cache" / "acbench"
