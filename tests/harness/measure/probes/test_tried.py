"""What ranks try at once: all know how it went, and a rank that nobody answers ends by its own error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.measure.probes.pass_error import PassError
from harness.measure.probes.tried import NoRoomError, RanksRaised, agreed, tried
from tests.rank_pool import RankPool


def _raised(rank: int, errors: dict[int, Exception]) -> int:
    if rank in errors:
        raise errors[rank]
    return rank


def _failure() -> PassError:
    return PassError("forward", ValueError("too long"), is_variant=True)


def _asked(rank: int, guilty: dict[int, str]) -> tuple[int | None, str, bool]:
    made = {"pass": _failure(), "memory": torch.OutOfMemoryError("no room here")}
    errors: dict[int, Exception] = {each: made[name] for each, name in guilty.items()}
    try:
        found = tried(lambda: _raised(rank, errors))
    except NoRoomError as error:
        return None, str(error), True
    return found.value, "" if found.error is None else type(found.error).__name__, found.has_raised


@pytest.mark.parametrize(
    ("guilty", "expected"),
    [
        pytest.param({}, [(0, "", False), (1, "", False)], id="nothing"),
        pytest.param({1: "pass"}, [(0, "", True), (None, "PassError", True)], id="on one rank"),
        pytest.param({0: "pass", 1: "pass"}, [(None, "PassError", True)] * 2, id="on both"),
        pytest.param(
            {0: "memory", 1: "pass"},
            [(None, "no room here", True), (None, "PASS", True)],
            id="out of memory on one rank",
        ),
    ],
)
def test_all_ranks_know(
    guilty: dict[int, str], expected: list[tuple[int | None, str, bool]], pool2: RankPool
) -> None:
    said = str(_failure())
    wanted = [(value, said if error == "PASS" else error, raised) for value, error, raised in expected]
    assert pool2.run(_asked, guilty, timeout_s=20.0) == wanted


def _alone(rank: int) -> None:
    def step() -> None:
        if rank:
            raise _failure()
        dist.all_reduce(torch.ones(1))

    tried(step, patience_s=0.2)


def test_a_rank_that_the_others_wait_for_in_a_collective_raises_its_own_error(pool2: RankPool) -> None:
    with pytest.raises(ValueError, match="too long"):
        pool2.run(_alone, timeout_s=20.0)


def test_without_ranks_nobody_is_asked() -> None:
    found = tried(lambda: _raised(0, {0: _failure()}))
    assert (found.value, type(found.error), found.has_raised) == (None, PassError, True)


def _of_agreed(rank: int, guilty: dict[int, str]) -> tuple[str, str]:
    made = {"pass": _failure(), "argument": ConfigError("batch", "is empty"), "odd": ValueError("odd")}
    try:
        found = agreed(lambda: _raised(rank, {each: made[name] for each, name in guilty.items()}))
    except RanksRaised as failures:
        return "RanksRaised", ", ".join(f"rank {each.rank}: {each.said}" for each in failures.raised)
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", str(found)


@pytest.mark.parametrize(
    ("guilty", "expected"),
    [
        pytest.param({}, [("", "0"), ("", "1")], id="nothing"),
        pytest.param({1: "pass"}, [("RanksRaised", "rank 1: ValueError: too long")] * 2, id="a pass"),
        pytest.param(
            {1: "argument"},
            [
                ("ConfigError", "rank 1: raises ConfigError: batch: is empty"),
                ("ConfigError", "batch: is empty"),
            ],
            id="a wrong argument",
        ),
        pytest.param(
            {0: "pass", 1: "odd"},
            [("ConfigError", "rank 1: raises ValueError: odd"), ("ValueError", "odd")],
            id="a pass on one, a wrong argument on the other",
        ),
    ],
)
def test_no_rank_goes_on_where_one_raises(
    guilty: dict[int, str], expected: list[tuple[str, str]], pool2: RankPool
) -> None:
    assert pool2.run(_of_agreed, guilty, timeout_s=20.0) == expected
