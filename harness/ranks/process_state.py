"""What a trial may leave behind in its process: undone where that is possible, named where it is not.

A process that lives on must be to the next trial what a new one would be. Switches of torch and of the
interpreter are compared and not put back: our own code restores what it changes, and code that does not
cannot be trusted with the rest. Nor does a process live on that has imported a package it was not started
with, because a user's module may keep anything.

What stays and shows in no number: torch gives some of its warnings once a process.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache  # no public way
from torch.nn.modules.module import _has_any_global_hook  # no public way

_OF_A_TRIAL = (Tensor, nn.Module, DeviceMesh)
_LATE_PACKAGES = {"triton"}
_DEVICES = ("cpu", "cuda")
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGINT})  # every start of a rank ignores Ctrl-C


class ProcessState:
    """What this process is like; made before its first trial."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._settings = _settings()
        self._packages = _packages()
        self._python_generator = random.getstate()
        self._numpy_generator = np.random.get_state()  # noqa: NPY002 (the legacy generator is the global one)
        self._torch_generator = torch.get_rng_state()
        self._seed = torch.initial_seed()
        self._freeze()

    def restore(self) -> list[str]:
        """Undo what the latest trial left behind; return the names of what it changed for good.

        Process groups are destroyed: no other rank may need this one any more.
        """
        held = self._collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if torch.cuda.is_initialized():
            held += _clear_cuda(self._seed)
        self._reset()
        return [*held, *self._changed_settings(), *sorted(_packages() - self._packages)]

    def _collect(self) -> list[str]:
        """Drop all garbage; return what is still alive of the trial."""
        if all(each is not self._unfrozen for each in gc.get_objects()):
            gc.unfreeze()  # timing has frozen the heap, with what was to become garbage
        if DeviceMesh in _kinds(gc.get_objects()):
            _forget_meshes()
        gc.collect()
        alive = _kinds(each for each in gc.get_objects() if each is not self._torch_generator)
        self._freeze()
        return sorted(f"a living {kind.__name__}" for kind in alive)

    def _freeze(self) -> None:
        """Keep what is here out of the collections of the next trial, and see whether that freezes too."""
        gc.freeze()
        self._unfrozen: list[None] = []  # counting what is frozen takes 40 ms

    def _reset(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        random.setstate(self._python_generator)
        np.random.set_state(self._numpy_generator)  # noqa: NPY002 (as above)
        torch.set_rng_state(self._torch_generator)

    def _changed_settings(self) -> list[str]:
        now = _settings()
        return [name for name, value in self._settings.items() if value != now[name]]


def _kinds(objects: Iterable[object]) -> set[type]:
    """Return the types of those `objects` that belong to a trial."""
    return {kind for kind in {type(each) for each in objects} if issubclass(kind, _OF_A_TRIAL)}


def _forget_meshes() -> None:
    """Forget what torch has worked out for device meshes: it holds them, and they their process groups."""
    # it brings Dynamo, half a second that only a rank may cost, and the driver imports this module too
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415 (no public way)

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for function in _memoised("torch.distributed"):
        function.cache_clear()


def _memoised(package: str) -> Iterator[Any]:
    """Yield the functions and methods of `package` whose results `functools` remembers."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for each in vars(module).values():
                yield from _memoised_of(each)


def _memoised_of(found: Any) -> Iterator[Any]:
    # by type: `isinstance` asks objects for their class, and some of torch's then warn of their deprecation
    members = vars(found).values() if issubclass(type(found), type) else (found,)
    for member in members:
        function = member.__func__ if type(member) in {classmethod, staticmethod} else member
        if type(function) is functools._lru_cache_wrapper:  # noqa: SLF001 (the type has no other name)
            yield function


def _clear_cuda(seed: int) -> list[str]:
    """Give the device's memory back and start its statistics anew; return what is still in use."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 (no public way; they count as allocated)
    torch._C._host_emptyCache()  # noqa: SLF001 (no public way; the pinned memory of offloading)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.manual_seed(seed)
    return ["memory of the device"] if torch.cuda.memory_allocated() else []


def _settings() -> dict[str, Any]:
    """Return what code may switch for its whole process; every start of a rank sets threads and CPUs anew."""
    backends = torch.backends
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES],
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
        "precision of matrix multiplications": (
            torch.get_float32_matmul_precision(),
            backends.cuda.matmul.allow_tf32,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "cuDNN": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "oneDNN": backends.mkldnn.enabled,
        "kernels of attention": (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "torch modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),  # noqa: SLF001 (no public way)
        "hooks of all modules": _has_any_global_hook(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "signal handlers": {number: signal.getsignal(number) for number in _SIGNALS},
        "folder": os.getcwd(),  # noqa: PTH109 (only compared)
        "sys.path": list(sys.path),
        "threads": threading.active_count(),
    }


def _packages() -> set[str]:
    """Return the imported packages, without those of the standard library and those that torch takes late."""
    return {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - _LATE_PACKAGES
