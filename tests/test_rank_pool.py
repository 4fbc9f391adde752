from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from strategies.base import StrategyError
from tests.rank_pool import RankFailedError, RankPool


def _sum_of_ranks(rank: int) -> int:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return int(total)


def _pid_and_arguments(
    rank: int, *arguments: int, **keywords: int
) -> tuple[int, tuple[int, ...], dict[str, int]]:
    return os.getpid(), (rank, *arguments), keywords


def _refuse(_rank: int) -> None:
    raise StrategyError("ac.ac_freq", "must be at least 1, got 0")


def _fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise KeyError("layers.0")
    dist.all_reduce(torch.zeros(1))


def _die_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def _hang_on_rank_1(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def _leave_default_dtype(_rank: int) -> None:
    torch.set_default_dtype(torch.float64)


class _NeedsTwoError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _raise_unpicklable(_rank: int) -> None:
    raise _NeedsTwoError(1, 2)


def _threads_that_wait_for_sockets(_rank: int) -> int:
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    names = [(thread / "comm").read_text("utf-8") for thread in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def test_groups_of_a_rank_share_the_thread_that_waits_for_sockets(pool2: RankPool) -> None:
    assert pool2.run(_threads_that_wait_for_sockets) == [1, 1]


def test_four_ranks_have_a_process_group(pool4: RankPool) -> None:
    assert pool4.run(_sum_of_ranks) == [6, 6, 6, 6]


def test_ranks_stand_between_calls_and_take_arguments(pool2: RankPool) -> None:
    first = pool2.run(_pid_and_arguments, 5, key=7)
    assert [reply[1:] for reply in first] == [((0, 5), {"key": 7}), ((1, 5), {"key": 7})]
    assert [reply[0] for reply in pool2.run(_pid_and_arguments)] == [reply[0] for reply in first]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        pytest.param(
            _refuse, StrategyError, "ac.ac_freq: must be at least 1, got 0", id="an error of all ranks"
        ),
        pytest.param(_fail_on_rank_1, KeyError, "'layers.0'", id="an error of one rank, not its peer's echo"),
        pytest.param(_die_on_rank_1, RankFailedError, "rank 1 died", id="a death"),
        pytest.param(
            _raise_unpicklable, RankFailedError, "_NeedsTwoError: 1 and 2", id="an error that cannot be sent"
        ),
    ],
)
def test_a_failure_reaches_the_test_and_the_pool_recovers(
    pool2: RankPool, function: object, error: type[Exception], message: str
) -> None:
    assert callable(function)
    with pytest.raises(error) as caught:
        pool2.run(function)
    assert str(caught.value) == message
    assert caught.value.__notes__[0].startswith("on rank ")
    assert pool2.run(_sum_of_ranks) == [1, 1]


def test_a_hung_rank_is_named_and_replaced(pool2: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"_hang_on_rank_1: ranks \[1\] did not return within 0.3 s"):
        pool2.run(_hang_on_rank_1, timeout_s=0.3)
    assert pool2.run(_sum_of_ranks) == [1, 1]


def test_a_changed_global_setting_is_refused(pool2: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"_leave_default_dtype: left .*'default dtype': torch.float64"):
        pool2.run(_leave_default_dtype)
    assert pool2.run(_sum_of_ranks) == [1, 1]
