"""Fork servers that are forks of another one do what those do that are programs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.process_tree import children_of
from harness.ranks.forkserver import ForkServer, ForkServerError
from tests.forked_servers import Standby, forks_of

FOLLOWED = "ACBENCH_FOLLOWED"
PATIENCE_S = 60.0


def say(path: str) -> None:
    facts = [str(Path.cwd()), os.environ.get(FOLLOWED, "nothing"), str("tests.rank_pool" in sys.modules)]
    Path(path).write_text("\n".join(facts), encoding="utf-8")
    sys.stdout.write("said")


@pytest.fixture
def forked(rank_server: ForkServer) -> Iterator[ForkServer]:
    with forks_of(rank_server), closing(ForkServer(())) as server:
        yield server


def test_a_fork_has_folder_environment_streams_and_modules(
    rank_server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(FOLLOWED, "yes")
    monkeypatch.chdir(tmp_path)
    with forks_of(rank_server), closing(ForkServer((__name__,))) as forked:
        child = forked.start(f"{__name__}:say", str(tmp_path / "facts"))
        died = forked.next_death(PATIENCE_S)
    assert died is not None
    assert (died.pid, died.code) == (child, 0)
    assert (tmp_path / "facts").read_text("utf-8").splitlines() == [str(tmp_path), "yes", "True"]
    assert capfd.readouterr().out == "said"


def test_it_ends_with_its_connection(forked: ForkServer) -> None:
    forked.await_ready()
    forked.close()
    with pytest.raises(ProcessLookupError):
        os.kill(forked.pid, 0)


def test_it_can_be_killed(forked: ForkServer, rank_server: ForkServer) -> None:
    forked.await_ready()
    os.kill(forked.pid, signal.SIGKILL)
    with pytest.raises(ForkServerError):
        forked.start("os:getpid", None)
    with forks_of(rank_server), closing(ForkServer(())) as other:
        other.await_ready()


def warn(_: None) -> None:
    warnings.warn("no error", stacklevel=1)
    sys.stdout.write("said")


def test_a_standby_warns_as_a_program_where_nobody_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "said.txt"
    with closing(Standby((), said).server()) as server:
        server.start(f"{__name__}:warn", None)
        died = server.next_death(PATIENCE_S)
    assert died is not None
    assert died.code == 0
    assert said.read_text("utf-8") == "said"
    assert capfd.readouterr() == ("", "")


def log(_: None) -> None:
    logging.getLogger(__name__).warning("logged")


def test_a_standby_logs_as_a_program(tmp_path: Path) -> None:
    said, logger = tmp_path / "said.txt", logging.getLogger(__name__)
    with (tmp_path / "captured.txt").open("w") as captured:
        handler = logging.StreamHandler(captured)
        logger.addHandler(handler)
        with closing(Standby((), said).server()) as server:
            server.start(f"{__name__}:log", None)
            assert server.next_death(PATIENCE_S) is not None
        logger.removeHandler(handler)
    assert said.read_text("utf-8") == "logged\n"


def test_a_standby_that_nobody_asks_ends_without_a_word(tmp_path: Path) -> None:
    standby = Standby(("no_such_module",), tmp_path / "said.txt")
    with pytest.raises(subprocess.TimeoutExpired):
        standby._server._process.wait(0.0)
    os.close(standby._asked)
    assert standby._server._process.wait(PATIENCE_S) == 1
    assert not (tmp_path / "said.txt").exists()


def test_servers_are_programs_again_outside(rank_server: ForkServer) -> None:
    with forks_of(rank_server):
        pass
    with closing(ForkServer(())) as server:
        server.await_ready()
        assert server.pid in children_of(os.getpid())
