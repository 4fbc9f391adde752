"""GPU names, driver, processes and energy from NVIDIA's management library, without a CUDA context.

`torch.cuda` is no substitute. `get_device_name` initialises CUDA. `list_gpu_processes` returns a printed text
without names, and fails where the driver hides the memory of a process. `power_draw` is a momentary power,
not an energy. The driver's version and MIG instances are missing.

Every function returns None where there is no library, no driver or no such counter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

_Answer = TypeVar("_Answer")

_JOULES_PER_MILLIJOULE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProcess:
    """A process that holds memory on a GPU.

    Fields:
        pid: as the driver numbers it, which inside a container may not be our numbering.
        name: its executable; `unknown` where it may not be read.
        used_bytes: its device memory; None where the driver does not say.
    """

    pid: int
    name: str
    used_bytes: int | None


@dataclass(slots=True)
class Energy:
    """Energy that a GPU has taken; set when the scope of `energy_meter` ends.

    Fields:
        joules: energy of the whole board for all processes; None where the driver has no counter.
    """

    joules: float | None = None


def device_name(index: int) -> str | None:
    """Return the name of the visible GPU `index`, as `torch.cuda.get_device_name` would."""
    return _ask(index, lambda handle: _text(pynvml.nvmlDeviceGetName(handle)))


def driver_version() -> str | None:
    """Return the version of the driver."""
    with _library() as has_library:
        return _text(pynvml.nvmlSystemGetDriverVersion()) if has_library else None


def device_processes(index: int) -> list[DeviceProcess] | None:
    """Return the processes that compute on the visible GPU `index`."""
    return _ask(
        index,
        lambda handle: [_process(entry) for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
    )


@contextmanager
def energy_meter(index: int) -> Iterator[Energy]:
    """Measure the energy that the visible GPU `index` takes within the scope."""
    energy = Energy()
    start_j = _total_energy_j(index)
    yield energy
    end_j = _total_energy_j(index)
    if start_j is not None and end_j is not None:
        energy.joules = end_j - start_j


def _total_energy_j(index: int) -> float | None:
    """Return the energy counter since the driver was loaded; Volta and later have one."""
    millijoules = _ask(index, pynvml.nvmlDeviceGetTotalEnergyConsumption)
    return None if millijoules is None else int(millijoules) * _JOULES_PER_MILLIJOULE


@contextmanager
def _library() -> Iterator[bool]:
    """Hold the library open; yields whether there is one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _ask(index: int, question: Callable[[Any], _Answer]) -> _Answer | None:
    """Return NVML's answer about a device; `None` where there is no library or no answer."""
    with _library() as has_library:
        if not has_library:
            return None
        try:
            handle = _handle(index)
            return None if handle is None else question(handle)
        except pynvml.NVMLError:
            return None


def _handle(index: int) -> Any | None:
    """Return the device that CUDA would number `index` under CUDA_VISIBLE_DEVICES.

    NVML numbers by PCI bus; CUDA does so with CUDA_DEVICE_ORDER=PCI_BUS_ID, and in a node of equal GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return _handle_by_name(names[index]) if index < len(names) else None


def _handle_by_name(name: str) -> Any | None:
    """Return the device called `name`: a number, the UUID of a MIG instance, or the start of a GPU's UUID."""
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith("MIG-"):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    handles = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount()))
    return next(
        (handle for handle in handles if _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(name)), None
    )


def _process(entry: Any) -> DeviceProcess:
    try:
        name = _text(pynvml.nvmlSystemGetProcessName(entry.pid))
    except pynvml.NVMLError:  # another user's, or of another PID namespace
        name = "unknown"
    return DeviceProcess(pid=entry.pid, name=name, used_bytes=entry.usedGpuMemory)


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer
