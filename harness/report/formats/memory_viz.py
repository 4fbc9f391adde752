"""A step as a snapshot that pytorch.org/memory_viz and `torch.cuda._memory_viz` open, of any device.

Each storage is a segment of its own: there is no allocator that would cut segments into blocks.

Source: torch/cuda/memory.py, `_snapshot`, whose dictionaries these are.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from harness.records.step_trace import StepTrace, TracedStorage

_Address = int
_FIRST_ADDRESS = 1 << 32
_ALIGNMENT = 512  # as CUDA's caching allocator rounds
_STREAM = 0


def to_memory_viz(traces: Sequence[StepTrace]) -> bytes:
    """Return the pickle of a trial's step; each rank is a device, and only storages on devices are in it."""
    ranks = max((trace.rank for trace in traces), default=-1) + 1
    snapshot: dict[str, Any] = {
        "segments": [],
        "device_traces": [[] for _ in range(ranks)],
        "allocator_settings": {},
        "external_annotations": [],
    }
    for trace in traces:
        memory = _Memory(trace)
        snapshot["device_traces"][trace.rank] = list(memory.events())
        snapshot["segments"] += memory.segments()
    # the page of torch reads protocol 4 and below
    return pickle.dumps(snapshot, protocol=4)


class _Memory:
    """Addresses of the storages of one rank, which are given once and never again."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._next = _FIRST_ADDRESS
        self._sizes: Counter[int] = Counter()
        self._addresses: dict[int, _Address] = {}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what the allocator did; another size is another storage at another place."""
        for number, nbytes in self._trace.start:
            if not self._trace.storages[number].on_host:
                self._place(number, nbytes)
        for change in self._trace.changes:
            number = change.storage
            if self._trace.storages[number].on_host:
                continue
            before = self._sizes[number]
            if before:
                for action in ("free_requested", "free_completed", "segment_free"):
                    yield self._event(action, number, change.operators)
            self._place(number, before + change.delta)
            if self._sizes[number]:
                for action in ("segment_alloc", "alloc"):
                    yield self._event(action, number, change.operators)

    def segments(self) -> list[dict[str, Any]]:
        """Return what lives at the end of the step; call it after `events`."""
        return [self._segment(number, size) for number, size in self._sizes.items() if size]

    def _place(self, number: int, nbytes: int) -> None:
        self._sizes[number] = nbytes
        self._addresses[number] = self._next
        self._next += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def _event(self, action: str, number: int, time_us: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": self._addresses[number],
            "size": self._sizes[number],
            "stream": _STREAM,
            "time_us": time_us,
            "compile_context": "N/A",
            "user_metadata": self._trace.storages[number].part,
            "frames": _frames(self._trace.storages[number]),
        }

    def _segment(self, number: int, size: int) -> dict[str, Any]:
        block = {
            "address": self._addresses[number],
            "size": size,
            "requested_size": size,
            "state": "active_allocated",
            "frames": _frames(self._trace.storages[number]),
        }
        return {
            "device": self._trace.rank,
            "address": self._addresses[number],
            "total_size": size,
            "allocated_size": size,
            "active_size": size,
            "requested_size": size,
            "stream": _STREAM,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [block],
        }


def _frames(storage: TracedStorage) -> list[dict[str, Any]]:
    """Return where a storage was made, innermost first: the operator, then the line of the model's code."""
    file, _, line = storage.source.rpartition(":")
    what = f"{storage.part} {storage.shape} {storage.dtype}".strip()
    frames = [{"name": what, "filename": "storage", "line": 0}]
    if storage.op:
        frames.append({"name": storage.op, "filename": "operator", "line": 0})
        frames.append({"name": storage.module, "filename": file or "module", "line": int(line or 0)})
    return frames
