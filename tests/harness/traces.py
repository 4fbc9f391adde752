"""Entries that leave something behind in their process, of every kind, and tell what they found there."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness.ranks.entry import RankContext

kept: list[Any] = []


def find(_payload: Any, _context: RankContext) -> dict[str, Any]:
    """Tell what a trial finds, and in which process."""
    return {
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "draws": [torch.rand(1).item(), float(np.random.rand()), random.random()],  # noqa: NPY002 (the global one)
        "variable": os.environ.get("ACBENCH_TRACE"),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        "sockets": _sockets(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "has_group": dist.is_initialized(),
        "is_deaf": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
    }


def leave(kind: str, context: RankContext) -> dict[str, Any]:
    """Leave a trace of one kind and tell in which process."""
    _TRACES[kind](context)
    return {"pid": os.getpid()}


def bring(module: str, _context: RankContext) -> dict[str, Any]:
    """Import what the process did not have, and tell in which one."""
    folder, _, name = module.rpartition("/")
    sys.path.append(folder)
    importlib.import_module(name)
    sys.path.remove(folder)
    return {"pid": os.getpid()}


def _sockets() -> int:
    with os.scandir("/proc/self/fd") as links:
        # the descriptor that lists them is among them
        return sum(os.readlink(link.path).startswith("socket:") for link in links)  # noqa: PTH115 (a target that is no path)


def _variable(_context: RankContext) -> None:
    os.environ["ACBENCH_TRACE"] = "left"
    del os.environ["PATH"]


def _draws(_context: RankContext) -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 (the global one)
    random.seed(1)


def _cycle() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    model.itself = [model]  # type: ignore[assignment]


def _garbage(_context: RankContext) -> None:
    _cycle()


def _frozen_garbage(_context: RankContext) -> None:
    gc.disable()
    _cycle()
    gc.freeze()
    gc.enable()


def _meshes(context: RankContext) -> None:
    """Fill the caches of DTensor, which hold meshes, which hold process groups."""
    mesh = init_device_mesh("cpu", (context.world_size,))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    (tensor @ tensor.redistribute(mesh, [Replicate()])).sum().full_tensor()  # type: ignore[attr-defined]


def _unfinished_line(_context: RankContext) -> None:
    sys.stdout.write("from Python")
    sys.stderr.write("to stderr")
    ctypes.CDLL(None).printf(b"from C")


def _warn(_context: RankContext) -> None:
    warnings.warn("shown once", stacklevel=1)


def _silence(_context: RankContext) -> None:
    warnings.simplefilter("ignore")


def _default_dtype(_context: RankContext) -> None:
    torch.set_default_dtype(torch.float64)


def _grad_mode(_context: RankContext) -> None:
    torch.set_grad_enabled(False)


def _deterministic(_context: RankContext) -> None:
    torch.use_deterministic_algorithms(True)


def _precision(_context: RankContext) -> None:
    torch.set_float32_matmul_precision("medium")


def _thread(_context: RankContext) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _handler(_context: RankContext) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _folder(_context: RankContext) -> None:
    os.chdir("/")


def _path(_context: RankContext) -> None:
    sys.path.append("/nowhere")


def _tensor(_context: RankContext) -> None:
    kept.append(torch.ones(1))


def _hook(_context: RankContext) -> None:
    nn.modules.module.register_module_forward_hook(lambda *_: None)


_TRACES = {
    "an environment variable": _variable,
    "draws": _draws,
    "garbage": _garbage,
    "frozen garbage": _frozen_garbage,
    "meshes": _meshes,
    "an unfinished line": _unfinished_line,
    "a warning": _warn,
    "no warnings": _silence,
    "default dtype": _default_dtype,
    "grad mode": _grad_mode,
    "deterministic algorithms": _deterministic,
    "precision of matrix multiplications": _precision,
    "threads": _thread,
    "signal handlers": _handler,
    "folder": _folder,
    "sys.path": _path,
    "a living Tensor": _tensor,
    "hooks of all modules": _hook,
}
