"""Fixtures of the whole suite: a plugin of each process that runs tests."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.predict import this_cpu
from harness.ranks.forkserver import ForkServer
from tests import rank_pool
from tests.forked_servers import Standby
from tests.rank_pool import RankPool

_MANY = 500
"""Objects since the latest collection that are worth one, which takes less than a millisecond."""

_STANDBY = pytest.StashKey[Standby]()

CONF = Path(__file__).resolve().parents[1] / "conf"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keep what earlier tests have imported and left out of all collections of garbage, for the same reason.

    A trial and a check collect several times each; without this it took up to a quarter of a second.
    """
    if sum(gc.get_count()) > _MANY:
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
    numbers = OmegaConf.merge(
        OmegaConf.load(CONF / "hardware" / "epyc_9004.yaml"), {"name": this_cpu.THIS_CPU}
    )
    this_cpu.keep(OmegaConf.to_container(numbers))  # type: ignore[arg-type]  # a mapping, as the file is


@pytest.fixture(scope="session", autouse=True)
def same_as_ranks() -> None:
    """Let this process keep and leave out what standing ranks do."""
    rank_pool.keep_options()
    rank_pool.seed_no_absent_device()
    rank_pool.collect_rarely()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    read_options_once()
    if not session.config.getoption("workers"):
        stand_by(session.config)


def read_options_once() -> None:
    """Let Hydra read each option once for this process and its forks: a third of each composition is YAML."""
    load = OmegaConf.load

    @cache
    def kept(path: str) -> bytes:
        return pickle.dumps(load(path))

    def loaded(file: Any) -> Any:
        path = str(getattr(file, "name", file))
        return pickle.loads(kept(path)) if Path(path).is_relative_to(CONF) else load(file)

    for option in CONF.rglob("*.yaml"):
        kept(str(option))
    OmegaConf.load = staticmethod(loaded)  # type: ignore[assignment, method-assign]


def stand_by(config: pytest.Config) -> None:
    """Fork the server of ranks, before the first test of this process."""
    said = config._tmp_path_factory.getbasetemp() / "ranks.txt"  # type: ignore[attr-defined]
    config.stash[_STANDBY] = Standby(rank_pool.PRELOAD, said)


@pytest.fixture(scope="session")
def rank_server(pytestconfig: pytest.Config) -> Iterator[ForkServer]:
    server = pytestconfig.stash[_STANDBY].server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def pool2(rank_server: ForkServer) -> Iterator[RankPool]:
    yield from standing(rank_server, 2)


@pytest.fixture(scope="session")
def pool4(rank_server: ForkServer) -> Iterator[RankPool]:
    yield from standing(rank_server, 4)


def standing(server: ForkServer, ranks: int) -> Iterator[RankPool]:
    pool = RankPool(server, ranks)
    pool.run(abs)  # the ranks start here, not in the time of the first test
    yield pool
    pool.close()
