"""Entries that succeed and fail in every way a rank can; each runs in a real process."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.ranks.entry import RankContext
from harness.ranks.rank_report import RankReport, read_reports

FOREVER_S = 600.0


def ok(payload: Any, context: RankContext) -> dict[str, Any]:
    for step in range(3):
        context.progress(step + 1, 3)
    total = torch.tensor(context.rank + 1)
    if context.world_size > 1:
        dist.all_reduce(total)
    return {"payload": payload, "sum": int(total)}


def environment(_payload: Any, context: RankContext) -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    return {
        "variables": {name: os.environ.get(name) for name in names},
        "threads": torch.get_num_threads(),
        "device": str(context.device),
        "has_group": dist.is_initialized(),
        "ignores_ctrl_c": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "main": sys.modules["__main__"].__dict__.get("__file__"),
    }


def talk(_payload: Any, _context: RankContext) -> dict[str, Any]:
    sys.stdout.write("from Python\n")
    sys.stdout.flush()
    libc = ctypes.CDLL(None)
    libc.puts(b"from C")
    libc.fflush(None)
    sys.stderr.write("from stderr")
    return {}


def fault(kind: str, context: RankContext) -> dict[str, Any]:
    """Fail on the last rank, in phase `parity`; the others wait for it in a collective."""
    context.phase("parity")
    if context.rank == context.world_size - 1:
        _FAULTS[kind]()
    if context.world_size > 1:
        dist.all_reduce(torch.zeros(1))
    return {}


def fault_of(plan: tuple[str, int], context: RankContext) -> dict[str, Any]:
    """Fail on one rank, in phase `parity`; the others wait for it in a collective."""
    kind, rank = plan
    _note_process(context)
    context.phase("parity")
    if context.rank == rank:
        _FAULTS[kind]()
    dist.all_reduce(torch.zeros(1))
    return {}


def fault_alone(plan: tuple[str, int], context: RankContext) -> dict[str, Any]:
    """Fail on one rank as soon as all run; the others neither wait for it nor notice."""
    kind, rank = plan
    _all_reports(context)
    if context.rank == rank:
        context.phase("parity")
        _FAULTS[kind]()
    time.sleep(FOREVER_S)
    return {}


def process(_payload: Any, _context: RankContext) -> dict[str, Any]:
    return {"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}


def prints(count: int, context: RankContext) -> dict[str, Any]:
    """Print so many MiB, and something before and after."""
    sys.stdout.write(f"begin {context.rank}\n")
    for _ in range(count):
        os.write(1, b"." * 2**20)
    sys.stdout.write("the end\n")
    return {}


def late_hang(_payload: Any, context: RankContext) -> dict[str, Any]:
    """Rank 0 writes its heartbeat long before rank 1 does, then waits for rank 1, which sleeps."""
    _note_process(context)
    context.phase("parity")
    if context.rank == 0:
        dist.all_reduce(torch.zeros(1))
    time.sleep(0.3)
    context.phase("parity")
    time.sleep(FOREVER_S)
    return {}


def unpicklable_result(_payload: Any, _context: RankContext) -> dict[str, Any]:
    return {"tensor": torch.zeros(1)}


def abort_after_result(_payload: Any, context: RankContext) -> dict[str, Any]:
    """Abort when every rank has its result: an earlier end would cut a peer off that still connects."""
    context.finish({"rank": context.rank})
    while any(report.state != "ok" for report in _all_reports(context)):
        time.sleep(0.01)
    os.abort()


def one_late(_payload: Any, context: RankContext) -> dict[str, Any]:
    """Rank 0 is done long before rank 1 needs it no more."""
    if context.rank == 1:
        time.sleep(0.5)
    return {"rank": context.rank}


def linger(folder: str, context: RankContext) -> dict[str, Any]:
    """Leave two process ids behind, the rank's own and that of a child of it, and hang."""
    child = os.fork()
    if child == 0:
        time.sleep(FOREVER_S)
    Path(folder, f"pids{context.rank}").write_text(f"{os.getpid()} {child} {os.getppid()}", "utf-8")
    time.sleep(FOREVER_S)
    return {}


def mute(kind: str, context: RankContext) -> dict[str, Any]:
    """Raise on the last rank when it cannot report as usual; the others wait for it in a collective."""
    context.phase("parity")
    dist.all_reduce(torch.zeros(1))  # every rank has reported: the folder may go
    if context.rank == context.world_size - 1:
        _MUTES[kind](context)
        raise _MuteError if kind == "a mute error" else OSError("\udcff.bin is odd")
    dist.all_reduce(torch.zeros(1))
    return {}


def forked(_payload: Any, context: RankContext) -> dict[str, Any]:
    """Fork, and let the child go on as if it were the rank, or raise where it is the first one."""
    if os.fork() == 0 and context.rank == 0:
        raise ValueError("in a child of the rank")
    context.phase("parity")
    time.sleep(0.2)
    return {"rank": context.rank}


def hidden(folder: str, context: RankContext) -> dict[str, Any]:
    """Leave processes in sessions of their own, of which one has forgotten its environment."""
    for index, environment in enumerate((dict(os.environ), {})):
        child = subprocess.Popen(["/bin/sleep", "600"], env=environment, start_new_session=True)
        Path(folder, f"hidden{context.rank}.{index}").write_text(str(child.pid), "utf-8")
    return {}


def kill_server(folder: str, context: RankContext) -> dict[str, Any]:
    """Leave a process in a session of its own, and kill the fork server."""
    child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    Path(folder, f"hidden{context.rank}.0").write_text(str(child.pid), "utf-8")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER_S)
    return {}


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def _break_stderr(_context: RankContext) -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    os.close(writer)


def _close_streams(_context: RankContext) -> None:
    sys.stdout.close()
    sys.stderr.close()


def _close_descriptors(_context: RankContext) -> None:
    os.close(1)
    os.close(2)


def _lose_stderr(_context: RankContext) -> None:
    sys.stderr = None


def _exhaust_descriptors(_context: RankContext) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def _remove_folder(context: RankContext) -> None:
    shutil.rmtree(context.trial_dir)


def _do_nothing(_context: RankContext) -> None:
    """Let the error be the trouble."""


_MUTES = {
    "a broken pipe": _break_stderr,
    "closed streams": _close_streams,
    "closed descriptors": _close_descriptors,
    "no stderr": _lose_stderr,
    "no descriptors": _exhaust_descriptors,
    "no folder": _remove_folder,
    "a mute error": _do_nothing,
}


def _note_process(context: RankContext) -> None:
    (context.trial_dir / f"pid{context.rank}").write_text(f"{os.getpid()}", "utf-8")


def _all_reports(context: RankContext) -> list[RankReport]:
    """Return the report of every rank, as soon as all have written one."""
    while len(reports := read_reports(context.trial_dir)) < context.world_size:
        time.sleep(0.01)
    return list(reports.values())


def _raise_value_error() -> None:
    raise ValueError("the width is odd")


def _raise_cuda_oom() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _allocate_too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def _raise_memory_error() -> None:
    raise MemoryError


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _segfault() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit_5() -> None:
    os._exit(5)


def _exit_0() -> None:
    os._exit(0)


def _sys_exit() -> None:
    sys.exit("no more")


def _hang() -> None:
    time.sleep(FOREVER_S)


def _hang_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(FOREVER_S)


_FAULTS = {
    "ValueError": _raise_value_error,
    "cuda_oom": _raise_cuda_oom,
    "cpu_oom": _allocate_too_much,
    "MemoryError": _raise_memory_error,
    "SIGKILL": _kill,
    "SIGTERM": _terminate,
    "SIGSEGV": _segfault,
    "exit 5": _exit_5,
    "exit 0": _exit_0,
    "SystemExit": _sys_exit,
    "hang": _hang,
    "deaf": _hang_deaf,
}
