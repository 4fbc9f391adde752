"""A collective's tensors are let go of when the program thinks so, however late gloo's threads are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from harness.measure.gloo import wait as settled
from harness.measure.gloo.wait import settled_collectives
from harness.measure.memory import allocator
from harness.measure.memory.counting_allocator import counting_allocator
from harness.measure.step import allocator_truth, instrument
from harness.models.base import Batch
from harness.ranks.forkserver import ForkServer
from strategies.estimate.collectives import collective_name
from strategies.estimate.liveness import key_of
from strategies.estimate.tensors import tensors_in
from tests.harness.measure.metered import LENGTH, Metered, tokens, transformer, warmed
from tests.rank_pool import RankPool

HELD_S = 0.2
functional = torch.ops._c10d_functional


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be one of two ranks without a backend: a collective is over at once and its `Work` holds nothing."""
    for name in {"wait", "get_future"} & set(vars(FakeWork)):
        monkeypatch.delattr(FakeWork, name)  # as with gloo, those of the base class are called
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Holding(TorchDispatchMode):
    """Keeps what every collective gets and makes, as a thread of gloo does.

    Args:
        held_s: how long; `None`: as long as this mode is active.
    """

    def __init__(self, held_s: float | None) -> None:
        super().__init__()
        self.held: list[list[Tensor]] = []
        self.ops: list[str] = []
        self._held_s = held_s
        self._timers: list[threading.Timer] = []

    def __exit__(self, *exc: object) -> None:
        for timer in self._timers:
            timer.join()
        super().__exit__(*exc)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        if collective_name(func) is not None:
            self._hold([*tensors_in(args), *tensors_in(kwargs), *tensors_in(result)])
        return result

    def _hold(self, tensors: list[Tensor]) -> None:
        self.held.append(tensors)
        if self._held_s is not None:
            self._timers.append(threading.Timer(self._held_s, tensors.clear))
            self._timers[-1].start()


def all_gather() -> None:
    dist.all_gather_into_tensor(torch.zeros(64), torch.zeros(32))


def all_gather_asynchronously() -> None:
    work = dist.all_gather_into_tensor(torch.zeros(64), torch.zeros(32), async_op=True)
    assert work is not None
    work.wait()


def all_gather_of_lists() -> None:
    dist.all_gather([torch.zeros(32), torch.zeros(32)], torch.zeros(32))


def reduce_scatter() -> None:
    dist.reduce_scatter_tensor(torch.zeros(32), torch.zeros(64))


def broadcast_coalesced() -> None:
    group: Any = dist.group.WORLD
    dist._broadcast_coalesced(group, [torch.zeros(32), torch.zeros(32)], 1024, 0)  # type: ignore[attr-defined]


def functional_all_reduce() -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    functional.wait_tensor(functional.all_reduce(torch.zeros(64), "sum", name))


def functional_all_reduce_in_a_graph() -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    functional.wait_tensor.default(functional.all_reduce.default(torch.zeros(64), "sum", name))


def functional_all_reduce_of_lists() -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for result in functional.all_reduce_coalesced([torch.zeros(32), torch.zeros(32)], "sum", name):
        functional.wait_tensor(result)


COLLECTIVES = [
    pytest.param(all_gather, id="all-gather"),
    pytest.param(all_gather_asynchronously, id="all-gather waited for later"),
    pytest.param(all_gather_of_lists, id="all-gather into a list"),
    pytest.param(reduce_scatter, id="reduce-scatter"),
    pytest.param(broadcast_coalesced, id="buffers of DDP"),
    pytest.param(functional_all_reduce, id="functional all-reduce"),
    pytest.param(functional_all_reduce_in_a_graph, id="functional all-reduce of a graph"),
    pytest.param(functional_all_reduce_of_lists, id="functional all-reduce of a list"),
]
pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_ends_when_its_tensors_are_let_go(collective: Callable[[], None]) -> None:
    with Holding(HELD_S) as holding, settled_collectives():
        collective()
        held = [tensor for tensors in holding.held for tensor in tensors]
    assert holding.held
    assert held == []


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_settling_changes_no_operator(collective: Callable[[], None]) -> None:
    with Holding(0.0) as plain:
        collective()
    with Holding(0.0) as settling, settled_collectives():
        collective()
    assert settling.ops == plain.ops


def dropped() -> None:
    dist.all_reduce(torch.zeros(64), async_op=True)


def future_kept() -> Any:
    work = dist.all_reduce(torch.zeros(64), async_op=True)
    assert work is not None
    work.wait()
    return work.get_future()


def functional_kept() -> Tensor:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    result: Tensor = functional.all_reduce(torch.zeros(64), "sum", name)
    return result


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(dropped, id="one that nobody waited for"),
        pytest.param(future_kept, id="one whose tensors the program may have"),
        pytest.param(functional_kept, id="a functional one that nobody waited for"),
    ],
)
def test_what_is_not_waited_for(collective: Callable[[], Any]) -> None:
    with Holding(None) as holding, settled_collectives():
        kept = collective()
        assert len(holding.held) == 1
    if isinstance(kept, Tensor):
        functional.wait_tensor(kept)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_backend_that_never_lets_go_is_refused(
    collective: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled, "_POLLS", 3)
    with (
        pytest.raises(
            RuntimeError,
            match=r"^gloo: tensors of a collective are still held a minute after the program waited for it; "
            r"bytes would count that are not the program's$",
        ),
        Holding(None),
        settled_collectives(),
    ):
        collective()


@pytest.mark.usefixtures("group")
def test_the_program_keeps_its_own_tensors() -> None:
    name, x = dist.group.WORLD.group_name, torch.arange(4.0)  # type: ignore[union-attr]
    with settled_collectives():
        assert functional.wait_tensor(functional.all_reduce_(x, "sum", name)) is x
        result = functional.wait_tensor(functional.all_reduce(x, "sum", name))
    assert key_of(result) != key_of(x)
    assert torch.equal(result, x)


class Gathering(nn.Module):
    """y = sin(w x), and a gathered buffer that lives for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        dist.all_gather_into_tensor(torch.zeros(64), torch.zeros(32))
        return (x * self.weight).sin()


@pytest.mark.usefixtures("group")
def test_a_buffer_that_only_the_backend_holds_is_neither_saved_nor_in_the_peak() -> None:
    model, batch = Gathering(), Batch(inputs=(torch.ones(4, 8),), targets=None)
    trainee = warmed(Metered(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)
    at_once = instrument(trainee, batch).memory
    with Holding(HELD_S):
        late = instrument(trainee, batch).memory
    assert at_once.saved_bytes == 128
    assert asdict(late) == asdict(at_once)


_WATCHED: list[tuple[Any, str]] = [
    (dist.Work, "wait"),
    (dist.Work, "get_future"),
    (dist.Work, "result"),
    (dist, "_broadcast_coalesced"),
    (dist.ProcessGroup, "allreduce"),
    (OpOverloadPacket, "__call__"),
    (OpOverload, "__call__"),
]


def test_without_a_group_no_call_is_followed() -> None:
    assert not dist.is_initialized()
    before = [vars(owner).get(name) for owner, name in _WATCHED]
    with settled_collectives():
        assert [vars(owner).get(name) for owner, name in _WATCHED] == before


@pytest.mark.usefixtures("group")
def test_nothing_is_left_behind() -> None:
    before = [vars(owner).get(name) for owner, name in _WATCHED]
    with settled_collectives():
        assert all(
            vars(owner).get(name) is not there for (owner, name), there in zip(_WATCHED, before, strict=True)
        )
    with pytest.raises(KeyError), settled_collectives():
        raise KeyError
    assert [vars(owner).get(name) for owner, name in _WATCHED] == before


@pytest.fixture(scope="module")
def lazy_pool(rank_server: ForkServer) -> Iterator[RankPool]:
    """Yield ranks that may be left as they are: without privileges nobody gets back from idle priority."""
    pool = RankPool(rank_server, 2)
    yield pool
    pool.close()


class Normalised(nn.Module):
    """A transformer whose logits are normalised by statistics, which DDP broadcasts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(self.model(x))
        return normalised


def _wrapped(kind: str, model: nn.Module) -> nn.Module:
    layers: Any = model.layers
    if kind == "ddp":
        return DistributedDataParallel(Normalised(model))
    if kind == "fsdp1":
        options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
        for index, layer in enumerate(layers):
            layers[index] = FullyShardedDataParallel(layer, **options)
        return FullyShardedDataParallel(model, **options)
    if kind == "fsdp2":
        for module in (*layers, model):
            fully_shard(module)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _measured(trainee: Metered) -> dict[str, Any]:
    report = instrument(trainee, tokens())
    truth = allocator_truth(trainee, tokens(), report.live)
    assert truth is not None
    return {**asdict(report.memory), "workspace_bytes": truth.workspace_bytes}


@contextmanager
def _late_backend(core: int) -> Iterator[None]:
    """Let no thread but this one run while this one wants to."""
    cores = os.sched_getaffinity(0)
    threads = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
    for thread in threads:
        os.sched_setaffinity(thread, {core})
        if thread != threading.get_native_id():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    yield
    for thread in threads:
        os.sched_setaffinity(thread, cores)


def _measured_late(
    rank: int, kind: str, cores: list[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    counter = counting_allocator()
    assert counter is not None
    assert allocator.install()
    trainee = transformer("full")
    model = _wrapped(kind, trainee.model)
    wrapped = Metered(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped.blocks = trainee.blocks
    warmed(warmed(wrapped, tokens()), tokens())
    _measured(wrapped)  # torch 2.11 makes something once, in the first update of DTensors under a mode
    first = _measured(wrapped)
    with _late_backend(cores[rank % len(cores)]):
        late = [_measured(wrapped) for _ in range(2)]
    counter.uninstall()
    return [first] * 2, late


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs threads of idle priority")
@pytest.mark.skipif(counting_allocator() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp", "tp"])
def test_bytes_do_not_depend_on_when_gloos_threads_run(lazy_pool: RankPool, kind: str) -> None:
    for first, late in lazy_pool.run(_measured_late, kind, sorted(os.sched_getaffinity(0))):
        assert late == first
