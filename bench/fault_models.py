"""Models that fail in one way each, for `model=python`: what a user's code can do to the ranks of a trial.

The last rank fails, in its first forward unless its factory says otherwise; the driver, which builds the same
model to check it, never does. Before it fails it touches `FAULT` in the trial's folder, which says that the
fault is under way, and when.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

FAULT = "fault"
"""A file in the trial's folder: when it was touched last is when the fault happened last."""

BEGUN = "begun"
"""A file in the trial's folder: when a rank that will hang began to build its model."""

_SLOW_S = 3.0
_VOCABULARY = 256  # as conf/model/python.yaml has it
_WIDTH = 8


class Faulty(nn.Module):
    """Tokens (B, S) to logits (B, S, V), unless `fault` does something else in `phase`."""

    def __init__(self, fault: Callable[[], None], phase: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(2)])
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        self._fault = fault
        self._phase = phase

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V)."""
        if tokens.device.type != "meta" and _is_last_rank() and _phase() == self._phase:
            _mark()
            self._fault()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


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


def python_error() -> nn.Module:
    """Return a model that raises."""
    return Faulty(_raise, "instrument")


def parity_error() -> nn.Module:
    """Return a model that raises when it is compared with its twin."""
    return Faulty(_raise, "parity")


def oom() -> nn.Module:
    """Return a model that asks for more memory than an address can name."""
    return Faulty(_exhaust, "instrument")


def sigkill() -> nn.Module:
    """Return a model whose rank is killed, as the kernel does when memory is exhausted."""
    return Faulty(lambda: os.kill(os.getpid(), signal.SIGKILL), "instrument")


def sigsegv() -> nn.Module:
    """Return a model that reads address 0."""
    return Faulty(lambda: _ignore(ctypes.string_at(0)), "instrument")


def hard_exit() -> nn.Module:
    """Return a model that leaves without a word."""
    return Faulty(lambda: os._exit(3), "instrument")


def hang() -> nn.Module:
    """Return a model that never returns."""
    if _is_last_rank() and not _log().with_name(BEGUN).exists():
        _log().with_name(BEGUN).touch()
    return Faulty(_hang, "instrument")


def hang_once() -> nn.Module:
    """Return a model that never returns, and works when the scheduler has started its job again."""
    return hang() if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else ok()


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


def _exhaust() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _hang() -> None:
    while True:
        signal.pause()
        _mark()  # a signal that asks for more than a stack has been heard
