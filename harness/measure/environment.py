"""The environment of a measurement: versions, device, driver, sources.

Nothing here imports torch or initialises CUDA, so that the driver can decide what to skip before any rank
exists. A process that has not imported torch has no process group and no CUDA context.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import runpy
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.measure import nvml

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    "torch",
    "hydra-core",
    "omegaconf",
    "wandb",
    "numpy",
    "scipy",
    "transformers",
    "triton",
    "nvidia-ml-py",
    "torch-remat",
    "accelerate",
    "peft",
    "trl",
    "torchtitan",
    "fairscale",
    "deepspeed",
)
_SOURCE_PACKAGES = ("harness", "strategies")
_SOURCE_SUFFIXES = {".py", ".cpp"}
_IDENTITY = (
    "python",
    "torch",
    "cuda",
    "device",
    "cpus",
    "omp_num_threads",
    "driver",
    "packages",
    "source_digest",
    "files",
)
_KEYS = (
    "python",
    "torch",
    "cuda",
    "backend",
    "device",
    "cpus",
    "omp_num_threads",
    "driver",
    "host",
    "world_size",
    "commit",
    "packages",
    "source_digest",
    "files",
    "foreign_processes",
)
"""Keys in the order in which records show them."""

_ID_DIGITS = 12
_GIT_DEADLINE_S = 10.0
_READ_BYTES = 16 * 1024 * 1024  # of one of the user's files; a token file can be of any size


def describe(device: torch.device | str, files: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the environment of measurements on `device`, as JSON values.

    Args:
        files: the user's own, which measurements depend on (key `files`: path to fingerprint).

    Keys: python, torch, cuda (version torch was built with), backend and world_size of the process group,
    device (its name), cpus, omp_num_threads (the user's limit of threads), driver, host, commit, packages,
    source_digest, foreign_processes (None where nobody can tell). What does not exist here is None.
    """
    kind, index = _parts(device)
    backend, world_size = _process_group()
    described = {
        **identity(device, files),
        "backend": backend,
        "host": platform.node(),
        "world_size": world_size,
        "commit": _own()["commit"],
        "foreign_processes": _foreign_processes(index) if kind == "cuda" else None,
    }
    return {key: described[key] for key in _KEYS}


def identity(device: torch.device | str, files: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the part of `describe` that `environment_id` reads."""
    kind, index = _parts(device)
    own = _own()
    return {
        "python": platform.python_version(),
        "torch": own["torch"],
        "cuda": own["cuda"],
        "device": nvml.device_name(index) if kind == "cuda" else cpu_name(),
        "cpus": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "driver": nvml.driver_version() if kind == "cuda" else None,
        "packages": own["packages"],
        "source_digest": own["source_digest"],
        "files": {str(path): _fingerprint(path) for path in files},
    }


def note_own_code() -> None:
    """Note what this process runs, once for itself and all that it forks: later changes are not theirs."""
    _own()


@cache
def _own() -> Mapping[str, Any]:
    """Return commit, sources and packages of this process."""
    version = torch_version()
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "torch": version["__version__"],
        "cuda": version["cuda"],
        "packages": versions,
        "source_digest": _source_digest(),
        "commit": _commit(Path(__file__)),
    }


def environment_id(environment: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits that two environments share when their measurements may be compared.

    Host, commit, world size and backend do not count: the digest of the sources stands for the commit, and
    the experiment for the last two.
    """
    identity = {key: environment[key] for key in _IDENTITY}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:_ID_DIGITS]


def _parts(device: torch.device | str) -> tuple[str, int]:
    """Return type and index of a device; `cuda` is `cuda:0`."""
    kind, _, index = str(device).partition(":")
    return kind, int(index or 0)


def _process_group() -> tuple[str | None, int]:
    """Return backend and size of the process group, `None` and 1 without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None, 1
    return distributed.get_backend(), distributed.get_world_size()


def torch_version() -> dict[str, Any]:
    """Return the names that `torch/version.py` defines: `__version__`, `cuda` and others."""
    specification = importlib.util.find_spec("torch")
    assert specification is not None
    assert specification.origin is not None
    return runpy.run_path(str(Path(specification.origin).with_name("version.py")))


def cpu_name() -> str:
    """Return the model of the CPU as the kernel names it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [
        value.strip()
        for key, _, value in (line.partition(":") for line in lines)
        if key.strip() == "model name"
    ]
    return names[0] if names else platform.processor() or platform.machine()


def _source_digest() -> str:
    """Return the SHA-256 of our own sources, paths included: results of other code are other results."""
    digest = hashlib.sha256()
    for package in _SOURCE_PACKAGES:
        root = _package_root(package)
        for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCE_SUFFIXES):
            content = path.read_bytes()
            digest.update(
                f"{package}/{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content
            )
    return digest.hexdigest()


_NO_FILE = "no file"
"""What a path is called that has no content; whoever reads it refuses it."""


def _fingerprint(path: Path) -> str:
    """Return the start of the SHA-256 of the content; of a large file, its size and time of change."""
    try:
        status = path.stat()
    except OSError:  # a plan needs no data
        return _NO_FILE
    if not stat.S_ISREG(status.st_mode):
        return _NO_FILE
    if status.st_size > _READ_BYTES:
        return f"{status.st_size} bytes, {status.st_mtime_ns} ns"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_ID_DIGITS]


def _package_root(package: str) -> Path:
    specification = importlib.util.find_spec(package)
    assert specification is not None
    assert specification.origin is not None
    return Path(specification.origin).parent


def _commit(source: Path) -> str | None:
    """Return the commit of the checkout that tracks `source`, with `-dirty` when changed, or None.

    A virtual environment inside somebody else's repository is no checkout of ours: hence the first question.
    """
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _git(source.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, `None` where it cannot be asked."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_DEADLINE_S, check=True)  # noqa: S603 (fixed words and our own path)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()


def _foreign_processes(index: int) -> list[dict[str, Any]] | None:
    """Return the processes of others on the GPU.

    A rank that computes there and does not find itself in the list is numbered otherwise (a container): then
    nobody can tell which entry is its own, and the answer is None.
    """
    processes = nvml.device_processes(index)
    if processes is None:
        return None
    own = os.getpid()
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized() and all(process.pid != own for process in processes):
        return None
    return [asdict(process) for process in processes if process.pid != own]
