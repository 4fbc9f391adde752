"""Models that fail in one way each, for `model=python`: what a user's code can do to the ranks of a trial.

The last rank fails, in its first forward unless its factory says otherwise; the driver, which builds the same
model to check it, never does. Before it fails it touches `FAULT` in the trial's folder, which says that the
fault is under way, and when.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

FAULT = "fault"
"""A file in the trial's folder: when it was touched last is when the fault happened last."""

_SLOW_S = 3.0
_SETTLED_S = 0.2
_FOR_EVER_S = 600
_LONG_CHARS = 20_000_000
_VOCABULARY = 256  # as conf/model/python.yaml has it
_WIDTH = 8


class Faulty(nn.Module):
    """Tokens (B, S) to logits (B, S, V), unless `fault` does something else in `phase`."""

    def __init__(self, fault: Callable[[], object], phase: str, *, in_backward: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(2)])
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        self._fault = fault
        self._phase = phase
        self._in_backward = in_backward

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V)."""
        is_due = tokens.device.type != "meta" and _is_last_rank() and _phase() == self._phase
        if is_due and not self._in_backward:
            self._strike()
        x = self.embedding(tokens)
        if is_due and self._in_backward and x.requires_grad:
            x.register_hook(lambda _gradient: self._strike())
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def _strike(self) -> None:
        _mark()
        self._fault()


def ok() -> nn.Module:
    """Return a model that works."""
    return Faulty(_nothing, "instrument")


def slow_start() -> nn.Module:
    """Return a model that works, late in one rank."""
    if _is_last_rank() and _phase() == "build":  # a trial builds its model some times more
        time.sleep(_SLOW_S)
    return ok()


def build_error() -> nn.Module:
    """Raise in the last rank."""
    if _is_last_rank():
        _mark()
        _raise()
    return ok()


def parity_error() -> nn.Module:
    """Return a model that raises when it is compared with its twin."""
    return Faulty(_raise, "parity")


def hang_once() -> nn.Module:
    """Return a model that never returns, and works when the scheduler has started its job again."""
    return Faulty(_hang, "instrument") if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else ok()


class _OwnError(BaseException):
    """What no `except Exception` takes."""


class _MuteError(Exception):
    """What cannot say what is wrong."""

    def __str__(self) -> str:
        raise RuntimeError


class _HeavyError(Exception):
    """What no pickle takes."""

    def __init__(self) -> None:
        super().__init__("this model fails on purpose")
        self.lock = threading.Lock()


def backward_error() -> nn.Module:
    """Return a model that raises in its backward."""
    return Faulty(_raise, "instrument", in_backward=True)


def planning_error() -> nn.Module:
    """Return a model that raises when it is planned, without memory."""
    return _Planned()


def driver_error() -> nn.Module:
    """Raise in the driver alone."""
    if "RANK" not in os.environ:
        _raise()
    return ok()


def driver_exit() -> nn.Module:
    """Exit the driver alone."""
    if "RANK" not in os.environ:
        sys.exit(3)
    return ok()


class _Planned(Faulty):
    """Raises on the meta device."""

    def __init__(self) -> None:
        super().__init__(_nothing, "instrument")

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V), of real tokens."""
        if tokens.device.type == "meta":
            _raise()
        return super().forward(tokens)


def _is_last_rank() -> bool:
    rank = os.environ.get("RANK")
    return rank is not None and int(rank) == int(os.environ["WORLD_SIZE"]) - 1


def _log() -> Path:
    """Return the log of this rank, which is its standard output."""
    return Path("/proc/self/fd/1").readlink()


def _phase() -> str:
    """Return the phase that this rank has reported."""
    report = json.loads(_log().with_suffix(".json").read_text("utf-8"))
    return str(report["phase"])


def _mark() -> None:
    _log().with_name(FAULT).touch()


def _nothing() -> None:
    """Let the model work."""


def _ignore(_value: bytes) -> None:
    """Take what nobody will see."""


def _raise() -> None:
    raise RuntimeError("this model fails on purpose")


def _raising(make: Callable[[], BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise make()

    return act


def _each(*acts: Callable[[], object]) -> Callable[[], None]:
    """Return what does one after the other."""

    def act() -> None:
        for each in acts:
            each()

    return act


def _recurse() -> None:
    _recurse()


def _break_stderr() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    os.close(writer)


def _close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


def _litter() -> None:
    for name, text in (("rank7.json", "{not json"), ("rank9.json", '{"rank": 9}'), ("rankx.json", "[]")):
        _log().with_name(name).write_text(text, "utf-8")


def _hide_children() -> None:
    for _ in range(2):
        subprocess.Popen(["/bin/sleep", str(_FOR_EVER_S)], start_new_session=True)
    time.sleep(_SETTLED_S)


def _sleep_deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(_FOR_EVER_S)


def _exhaust() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _hang() -> None:
    while True:
        signal.pause()
        _mark()  # a signal that asks for more than a stack has been heard


ACTS: Mapping[str, Callable[[], object]] = {
    "python_error": _raise,
    # asks for more memory than an address can name
    "oom": _exhaust,
    # as the kernel kills a rank when memory is exhausted
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda: _ignore(ctypes.string_at(0)),
    "hard_exit": lambda: os._exit(3),
    "hang": _hang,
    # as if all were well
    "exit_0": lambda: os._exit(0),
    "sigabrt": os.abort,
    "system_exit": lambda: sys.exit(0),
    "keyboard_interrupt": _raising(KeyboardInterrupt),
    "own_base_exception": _raising(_OwnError),
    # an error names a file that is no UTF-8
    "half_characters": _raising(lambda: FileNotFoundError("\udcff.bin")),
    # an error is as long as a book
    "long_message": _raising(lambda: RuntimeError("x" * _LONG_CHARS)),
    # an error is written for a page and a terminal
    "hostile_message": _raising(lambda: RuntimeError("</script><script>x</script>\x1b[31m\0| `a` =cmd()")),
    # an error cannot be printed
    "mute_error": _raising(_MuteError),
    # an error cannot be pickled
    "heavy_error": _raising(_HeavyError),
    "recursion": _recurse,
    "memory_error": lambda: bytearray(1 << 60),
    # fails when who reads its messages is gone
    "broken_stderr": _each(_break_stderr, _raise),
    # fails when Python's streams are closed
    "closed_streams": _each(_close_streams, _raise),
    # fails when its log is closed
    "closed_descriptors": _each(lambda: os.close(1), lambda: os.close(2), _raise),
    # fails without a stream for errors
    "no_stderr": _each(lambda: setattr(sys, "stderr", None), _raise),
    # fails when no file can be opened
    "no_descriptors": _each(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)), _raise),
    # removes the folder of its trial, and fails
    "no_folder": _each(lambda: shutil.rmtree(_log().parent), _raise),
    # leaves files which look like reports, and fails
    "junk_reports": _each(_litter, _raise),
    # leaves a folder where its record shall be, and works
    "folder_as_record": lambda: _log().with_name("record.json").mkdir(exist_ok=True),
    # forks a process which runs on as if it were the rank, and works
    "forked_twin": os.fork,
    # starts processes in sessions of their own, and works
    "hidden_children": _hide_children,
    # leaves while a process of another session holds its log
    "daemon_and_exit": _each(_hide_children, lambda: os._exit(4)),
    # kills the process that has forked it
    "server_killed": _each(lambda: os.kill(os.getppid(), signal.SIGKILL), lambda: time.sleep(_FOR_EVER_S)),
    "group_killed": lambda: os.killpg(0, signal.SIGKILL),
    # overwrites the variables of its rank, and works
    "overwritten_environment": lambda: os.environ.update(MASTER_ADDR="nowhere.invalid", RANK="7"),
    # works, and nobody may read its files
    "closed_mask": lambda: os.umask(0o777),
    # works, and would abort an orderly exit
    "abort_at_exit": lambda: atexit.register(os.abort),
    # works, and leaves a thread that never ends
    "thread_left": lambda: threading.Thread(target=time.sleep, args=(_FOR_EVER_S,)).start(),
    # the rank is frozen
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    # never returns and hears no signal
    "deaf": _sleep_deaf,
    # never gives the interpreter back
    "lock_held": lambda: ctypes.PyDLL(None).sleep(_FOR_EVER_S),
}
"""What a model does in its first forward, by name: `__getattr__` makes a factory of each."""


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """Return the factory of the model that does one of `ACTS`."""
    if name not in ACTS:
        raise AttributeError(name)
    return lambda: Faulty(ACTS[name], "instrument")
