"""Devices of this machine: what `mesh.device` means here."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.experiment.mesh import Mesh

_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""What the drivers of GPUs bring along: NVIDIA's, that of Tegra, of Windows' Linux, and AMD's."""


def device_type(mesh: Mesh) -> str:
    """Return `cuda` or `cpu`: what `mesh.device` means on this machine."""
    if mesh.device != "auto":
        return mesh.device
    return "cuda" if has_cuda() else "cpu"


def has_cuda() -> bool:
    """Return whether torch sees a CUDA device; where no driver is, torch need not be asked."""
    return any(Path(path).exists() for path in _DRIVERS) and torch.cuda.is_available()


def cuda_count() -> int:
    """Return the number of CUDA devices that torch sees."""
    return torch.cuda.device_count() if has_cuda() else 0
