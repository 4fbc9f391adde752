"""Fixtures of the whole suite: a plugin of each process that runs tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from harness.predict import this_cpu
from harness.ranks.forkserver import ForkServer
from strategies.budget.planning import block_options
from tests import rank_pool
from tests.rank_pool import RankPool

HARDWARE = Path(__file__).parents[1] / "conf" / "hardware"


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Keep what earlier files have imported and left out of all collections of garbage, for the same reason.

    A trial collects five times; without this each took a quarter of a second late in a run of all tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let `hardware=this_cpu` find numbers in the user's cache, which is otherwise as it was."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = tmp_path_factory.mktemp("cache")
    for entry in own.iterdir() if own.is_dir() else ():  # such as a browser's
        if entry.name != "acbench":
            (folder / entry.name).symlink_to(entry)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    numbers = OmegaConf.merge(OmegaConf.load(HARDWARE / "epyc_9004.yaml"), {"name": this_cpu.THIS_CPU})
    this_cpu.keep(OmegaConf.to_container(numbers))  # type: ignore[arg-type]  # a mapping, as the file is


@pytest.fixture(scope="session", autouse=True)
def options_of_all_tests() -> Iterator[None]:
    """Search the options of equal blocks once for all tests; by itself a process keeps those of a few."""
    shared = lru_cache(maxsize=None)(block_options._all.__wrapped__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_options, "_all", shared)
        yield


@pytest.fixture(scope="session", autouse=True)
def seeds_of_devices_that_are_there() -> Iterator[None]:
    """Seed no device that is not there: torch keeps each such seed with the text of the whole stack."""
    with pytest.MonkeyPatch.context() as patch:
        for devices in (torch.cuda, torch.xpu):
            if not devices.is_available():
                patch.setattr(devices, "manual_seed_all", lambda _seed: None)
        yield


@pytest.fixture(scope="session")
def rank_server() -> Iterator[ForkServer]:
    server = ForkServer(rank_pool.PRELOAD)
    yield server
    server.close()


@pytest.fixture(scope="session")
def pool2(rank_server: ForkServer) -> Iterator[RankPool]:
    pool = RankPool(rank_server, 2)
    pool.run(abs)  # the ranks start here, not in the time of the first test
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4(rank_server: ForkServer) -> Iterator[RankPool]:
    pool = RankPool(rank_server, 4)
    pool.run(abs)  # the ranks start here, not in the time of the first test
    yield pool
    pool.close()
