"""The counting CPU allocator: compiled on first use, loaded with ctypes, installed in torch on request."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("counting_allocator.cpp")
_BUILD_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCounts:
    """Requested bytes of the blocks that live.

    Fields:
        live_bytes, peak_bytes: those of the threads that run the model; the peak since `reset_peaks`.
        window_peak_bytes: the same peak since `reset_window`.
        allocations, allocated_bytes: number and bytes of the blocks, larger than a scalar, they have had.
        backend_live_bytes, backend_peak_bytes: those of all other threads, such as gloo's.
    """

    live_bytes: int
    peak_bytes: int
    window_peak_bytes: int
    allocations: int
    allocated_bytes: int
    backend_live_bytes: int
    backend_peak_bytes: int


class CountingAllocator:
    """Counts what torch allocates on the CPU, from `install` on; blocks made before are not known to it."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def install(self) -> bool:
        """Put it in place and count this thread's blocks as the model's; `False` where that cannot be."""
        self.count_this_thread(as_model=True)
        return bool(self._library.acb_install())

    @property
    def is_installed(self) -> bool:
        """True if torch allocates through it now."""
        return bool(self._library.acb_is_installed())

    def uninstall(self) -> None:
        """Put back the allocator that was in place; blocks that live are freed correctly."""
        self._library.acb_uninstall()

    def count_this_thread(self, *, as_model: bool) -> None:
        """Count what the calling thread allocates from now on as the model's, or as the backend's."""
        self._library.acb_count_this_thread(int(as_model))

    def reset_peaks(self) -> None:
        """Start the peaks at what lives now."""
        self._library.acb_reset_peaks()

    def reset_window(self) -> None:
        """Start the window's peak at what lives now."""
        self._library.acb_reset_window()

    def read(self) -> BlockCounts:
        """Return the counts."""
        values = [ctypes.c_int64() for _ in range(7)]
        self._library.acb_read(*map(ctypes.byref, values))
        return BlockCounts(**dict(zip(BlockCounts.__slots__, (value.value for value in values), strict=True)))


@functools.cache
def counting_allocator() -> CountingAllocator | None:
    """Return the process's counting allocator, not yet installed, or `None` where it cannot be built."""
    library = build()
    return None if library is None else CountingAllocator(library)


def build() -> Path | None:
    """Return the library, compiled unless the cache has it; `None` without compiler or cache folder."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    library = Path(cache, "acbench", f"counting_allocator-{digest}.so")
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, library)
    except (OSError, subprocess.SubprocessError):
        return None
    return library


def _compile(compiler: str, library: Path) -> None:
    """Compile next to `library` and rename, so that ranks that start together never load half a file."""
    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        product = Path(folder) / library.name
        command = [
            compiler, "-shared", "-fPIC", "-O2", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-I{root / 'include'}", str(_SOURCE), "-o", str(product), f"-L{root / 'lib'}", "-lc10",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_S)  # noqa: S603 (our own command)
        product.replace(library)
