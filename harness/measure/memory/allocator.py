"""The allocator's own count of a training step: the second source, after live storages.

On CUDA the caching allocator's own statistics; on CPU the counting allocator, or torch.profiler's memory
events where it is not installed. What stands above the live storages is memory that kernels allocate for
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from harness.measure.memory.counting_allocator import CountingAllocator, counting_allocator
from harness.records.measured import Allocator
from strategies.estimate.collectives import group_methods
from strategies.estimate.patched import wrapped


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTotals:
    """Live storages as the allocator of the device sees them: on CPU, host copies are among them.

    Fields:
        standing_bytes: storages that the step found.
        stale_bytes: those of them that hold gradients of the step before, which the step drops first.
        peak_bytes: highest total during the step.
    """

    standing_bytes: int
    stale_bytes: int
    peak_bytes: int


def install() -> bool:
    """Count the CPU's allocations from now on, `False` without compiler; call it before building a model."""
    allocator = counting_allocator()
    return allocator is not None and allocator.install()


def measure(step: Callable[[], None], *, device: str, live: LiveTotals) -> Allocator | None:
    """Run `step` and return what the allocator of `device` saw, or `None` for a device without one (meta)."""
    if device == "cuda":
        return _on_cuda(step, live)
    if device != "cpu":
        return None
    allocator = counting_allocator()
    if allocator is not None and allocator.is_installed:
        return _on_cpu(step, live, allocator)
    return _profiled(step, live)


def _on_cpu(step: Callable[[], None], live: LiveTotals, allocator: CountingAllocator) -> Allocator:
    allocator.count_this_thread(as_model=True)
    allocator.reset_peaks()
    before = allocator.read()
    with _collectives_as_backend(allocator):
        step()
    after = allocator.read()
    return _report(
        "counting allocator",
        live,
        step_peak_bytes=after.peak_bytes - before.live_bytes,
        backend_bytes=after.backend_peak_bytes - before.backend_live_bytes,
    )


@contextmanager
def _collectives_as_backend(allocator: CountingAllocator) -> Iterator[None]:
    """Count what process groups allocate in this thread as the backend's: gloo's reduce-scatter copies."""

    def apart(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        allocator.count_this_thread(as_model=False)
        try:
            return original(*args, **kwargs)
        finally:
            allocator.count_this_thread(as_model=True)

    with ExitStack() as patches:
        for name in group_methods():
            patches.enter_context(wrapped(dist.ProcessGroup, name, apart))
        yield


def _on_cuda(step: Callable[[], None], live: LiveTotals) -> Allocator:
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # an allocation lets go of blocks that waited for other streams
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return _report(
        "cuda caching allocator",
        live,
        step_peak_bytes=after["requested_bytes.all.peak"] - before["requested_bytes.all.current"],
        allocated_bytes=after["allocated_bytes.all.peak"],
        reserved_bytes=after["reserved_bytes.all.peak"],
    )


def _profiled(step: Callable[[], None], live: LiveTotals) -> Allocator:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto = profiler.profiler
    assert kineto is not None, "a finished profile has its raw events"
    # only raw events tell single blocks; of those that stood before they tell some, so all such are left out
    blocks: dict[int, int] = {}
    running = peak = 0
    events = _allocations(kineto.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: int(event.start_time_ns)):
        block = event.extra_fields
        running -= blocks.pop(block.ptr, 0)
        if block.alloc_size > 0:
            blocks[block.ptr] = block.alloc_size
            running += block.alloc_size
        peak = max(peak, running)
    return _report("torch.profiler memory events", live, step_peak_bytes=peak - live.stale_bytes)


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event
        yield from _allocations(event.children)


def _report(
    source: str,
    live: LiveTotals,
    *,
    step_peak_bytes: int,
    allocated_bytes: int | None = None,
    reserved_bytes: int | None = None,
    backend_bytes: int = 0,
) -> Allocator:
    """Return an allocator's numbers next to those of the meter."""
    requested_bytes = live.standing_bytes + step_peak_bytes
    return Allocator(
        source=source,
        peak_requested_bytes=requested_bytes,
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=reserved_bytes,
        workspace_bytes=max(0, requested_bytes - live.peak_bytes),
        backend_bytes=backend_bytes,
    )
