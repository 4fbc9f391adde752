"""What ranks try at once: all know how it went, and a rank that nobody answers ends by its own error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness.measure.probes.pass_error import PassError
from harness.measure.probes.tried import NoRoomError, tried
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
