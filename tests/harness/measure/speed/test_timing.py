from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from harness.errors import ConfigError
from harness.measure.speed.timing import (
    PairedTimes,
    StepFunction,
    clock_for,
    consecutive,
    cuda_time_s,
    host_time_s,
    interleave,
)
from tests.gpu.devices import CUDA
from tests.rank_pool import RankPool


@dataclass
class Tape:
    """Two steps that write down when they ran, and a clock that gives out 1, 2, 3 … seconds."""

    calls: str = ""
    now_s: float = 0.0
    was_enabled: list[bool] = field(default_factory=list)

    def variant(self) -> None:
        self.calls += "A"
        self.was_enabled.append(gc.isenabled())

    def twin(self) -> None:
        self.calls += "B"

    def __call__(self, step: StepFunction) -> float:
        self.calls += "("
        step()
        self.calls += ")"
        self.now_s += 1
        return self.now_s


@pytest.mark.parametrize(
    ("warmup", "pairs", "calls", "samples"),
    [
        pytest.param(0, 1, "(A)(B)", PairedTimes(variant_s=(1,), twin_s=(2,)), id="one pair"),
        pytest.param(0, 2, "(A)(B)(B)(A)", PairedTimes(variant_s=(1, 4), twin_s=(2, 3)), id="A B B A"),
        pytest.param(
            2,
            3,
            "ABAB(A)(B)(B)(A)(A)(B)",
            PairedTimes(variant_s=(1, 4, 5), twin_s=(2, 3, 6)),
            id="warm-up is not timed",
        ),
    ],
)
def test_variant_and_twin_take_turns(warmup: int, pairs: int, calls: str, samples: PairedTimes) -> None:
    tape = Tape()
    assert interleave(tape.variant, tape.twin, warmup=warmup, pairs=pairs, clock=tape) == samples
    assert tape.calls == calls


@pytest.mark.parametrize(
    ("enough", "pairs", "asked", "timed"),
    [
        pytest.param(12, 20, [10, 12], 12, id="at the second question"),
        pytest.param(99, 14, [10, 12], 14, id="never, and the last pair asks nothing"),
        pytest.param(0, 9, [], 9, id="few pairs ask nothing"),
    ],
)
def test_pairs_end_where_they_are_enough(enough: int, pairs: int, asked: list[int], timed: int) -> None:
    found: list[int] = []

    def is_enough(samples_s: Sequence[Sequence[float]]) -> bool:
        found.append(len(samples_s[0]))
        return found[-1] >= enough

    tape = Tape()
    samples = interleave(tape.variant, tape.twin, warmup=0, pairs=pairs, clock=tape, is_enough=is_enough)
    assert (found, len(samples.variant_s), len(samples.twin_s)) == (asked, timed, timed)


def test_one_alone_is_timed_after_its_warm_up() -> None:
    tape = Tape()
    assert consecutive(tape.variant, warmup=2, count=3, clock=tape) == (1, 2, 3)
    assert tape.calls == "AA(A)(A)(A)"


@pytest.mark.parametrize(
    ("warmup", "pairs", "message"),
    [
        pytest.param(-1, 1, r"^warmup: must be at least 0, got -1$", id="negative warm-up"),
        pytest.param(0, 0, r"^pairs: must be at least 1, got 0$", id="no pair"),
    ],
)
def test_what_cannot_be_timed_is_refused(warmup: int, pairs: int, message: str) -> None:
    tape = Tape()
    with pytest.raises(ConfigError, match=message):
        interleave(tape.variant, tape.twin, warmup=warmup, pairs=pairs, clock=tape)
    assert tape.calls == ""


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^count: must be at least 1, got 0$"):
        consecutive(Tape().variant, warmup=0, count=0, clock=Tape())


def no_collection_falls_into_a_timed_step() -> None:
    tape = Tape()
    interleave(tape.variant, tape.twin, warmup=0, pairs=2, clock=tape)
    assert tape.was_enabled == [False, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def the_collector_is_left_as_it_was_found() -> None:
    gc.disable()
    gc.freeze()
    interleave(Tape().variant, Tape().twin, warmup=0, pairs=1, clock=Tape())
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0


def the_collector_is_left_as_it_was_found_when_a_step_fails() -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        interleave(fail, fail, warmup=0, pairs=1, clock=Tape())
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


def cycles_of_one_pair_are_gone_before_the_next() -> None:
    seen = []

    def make_a_cycle() -> None:
        seen.append(sum(isinstance(thing, Cycle) for thing in gc.get_objects()))
        Cycle()

    interleave(make_a_cycle, make_a_cycle, warmup=0, pairs=2, clock=Tape())
    assert seen == [0, 1, 0, 1]


def with_nothing_frozen(rank: int, claim: Callable[[], None]) -> None:
    """Examine a claim about the heap of one rank; end with what the rank has frozen."""
    if rank:
        return
    gc.unfreeze()
    try:
        claim()
    finally:
        gc.enable()
        gc.freeze()


@pytest.mark.parametrize(
    "claim",
    [
        no_collection_falls_into_a_timed_step,
        the_collector_is_left_as_it_was_found,
        the_collector_is_left_as_it_was_found_when_a_step_fails,
        cycles_of_one_pair_are_gone_before_the_next,
    ],
)
def test_the_heap(pool2: RankPool, claim: Callable[[], None]) -> None:
    pool2.run(with_nothing_frozen, claim)  # a rank has a heap that may change


def test_the_host_clock_counts_seconds_of_the_step() -> None:
    assert 0 < host_time_s(lambda: None) < 1


def test_the_clock_suits_the_device() -> None:
    assert clock_for(torch.device("cpu")) is host_time_s
    on_cuda = clock_for(torch.device("cuda:1"))
    assert isinstance(on_cuda, partial)
    assert (on_cuda.func, on_cuda.args) == (cuda_time_s, (torch.device("cuda:1"),))


@pytest.mark.parametrize("kind", [CUDA])
def test_the_clock_waits_for_queued_work(kind: str) -> None:
    device = torch.device(kind, 0)
    clock, width = clock_for(device), 4096 if kind == "cuda" else 512
    matrix = torch.ones(width, width, device=device)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    multiply(1)
    many_s = clock(lambda: multiply(20))
    one_s = clock(lambda: multiply(1))
    assert many_s > 5 * one_s
