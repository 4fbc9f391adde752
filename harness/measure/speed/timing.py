"""Step times of variant and twin, taken in turns so that the machine's noise cancels."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from harness.errors import require_at_least
from strategies.estimate.patched import is_frozen, without_collector

_SECONDS_PER_MILLISECOND = 1e-3

StepFunction = Callable[[], None]
"""One whole training step; it may queue work on a device and return before that is done."""

Progress = Callable[[int, int], None]
"""Told how many of how many steps are done, always between two timed steps."""


StepClock = Callable[[StepFunction], float]
"""Runs one step, with everything that the step queues, and returns its duration in seconds."""

Enough = Callable[[Sequence[Sequence[float]]], bool]
"""Says of the times of each step so far whether they are enough."""

LEAST_TURNS = 10
"""Turns before the first question whether they are enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTimes:
    """Step times in seconds; equal indices were taken side by side."""

    variant_s: tuple[float, ...]
    twin_s: tuple[float, ...]


def clock_for(device: torch.device) -> StepClock:
    """Return the clock that suits `device`."""
    return partial(cuda_time_s, device) if device.type == "cuda" else host_time_s


def host_time_s(step: StepFunction) -> float:
    """Return the wall-clock time of a step on a device that computes while it is called, in seconds."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def cuda_time_s(device: torch.device, step: StepFunction) -> float:
    """Return the time of a step between two events on the current stream of `device`, in seconds.

    The device is idle when a step starts, so that no step pays for the one before it.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        start.record()
        step()
        end.record()
    torch.cuda.synchronize(device)  # side streams too: what they still do belongs to the step
    return float(start.elapsed_time(end)) * _SECONDS_PER_MILLISECOND


def _in_silence(_done: int, _total: int) -> None:
    pass


def _never(_samples_s: Sequence[Sequence[float]]) -> bool:
    return False


def interleave(
    variant: StepFunction,
    twin: StepFunction,
    *,
    warmup: int,
    pairs: int,
    clock: StepClock,
    progress: Progress = _in_silence,
    is_enough: Enough = _never,
) -> PairedTimes:
    """Time `pairs` steps of each in the order A B B A, after `warmup` untimed ones of each.

    Neighbours form a pair; that every second pair is turned round cancels what going first costs. Garbage is
    collected between pairs, never within a step. Fewer pairs are timed where `is_enough` says so.

    Raises:
        ConfigError: a negative warm-up, or no pair.
    """
    require_at_least("warmup", warmup, 0)
    require_at_least("pairs", pairs, 1)
    steps = variant, twin
    variant_s, twin_s = in_turns(
        steps, warmup=warmup, turns=pairs, clock=clock, progress=progress, is_enough=is_enough
    )
    return PairedTimes(variant_s=variant_s, twin_s=twin_s)


def consecutive(
    step: StepFunction, *, warmup: int, count: int, clock: StepClock, progress: Progress = _in_silence
) -> tuple[float, ...]:
    """Time `count` steps after `warmup` untimed ones, where two models do not fit at once; seconds.

    Raises:
        ConfigError: a negative warm-up, or nothing to time.
    """
    require_at_least("warmup", warmup, 0)
    require_at_least("count", count, 1)
    (samples_s,) = in_turns([step], warmup=warmup, turns=count, clock=clock, progress=progress)
    return samples_s


def in_turns(
    steps: Sequence[StepFunction],
    *,
    warmup: int,
    turns: int,
    clock: StepClock,
    progress: Progress = _in_silence,
    is_enough: Enough = _never,
) -> list[tuple[float, ...]]:
    """Return the times of each step, seconds; every second turn takes the steps in the other order.

    `is_enough` is asked after `LEAST_TURNS` turns and then after every second one, so that each order is
    taken as often as the other.
    """
    for _ in range(warmup):
        for step in steps:
            step()
    samples_s: list[list[float]] = [[] for _ in steps]
    with _quiet_heap() as collect:
        for turn in range(turns):
            progress(turn, turns)
            collect()
            for step, times_s in list(zip(steps, samples_s, strict=True))[:: -1 if turn % 2 else 1]:
                times_s.append(clock(step))
            done = turn + 1
            if LEAST_TURNS <= done < turns and done % 2 == 0 and is_enough(samples_s):
                progress(turns, turns)
                break
    return [tuple(times_s) for times_s in samples_s]


@contextmanager
def _quiet_heap() -> Iterator[Callable[[], int]]:
    """Keep the garbage collector out of the scope, except where it is called: cycles may hold activations.

    What lives at the start is frozen, so that a call costs microseconds.
    """
    was_frozen = is_frozen()
    gc.collect()
    gc.freeze()
    try:
        with without_collector():
            yield gc.collect
    finally:
        if not was_frozen:
            gc.unfreeze()
