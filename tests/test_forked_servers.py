"""Fork servers that are forks of another one do what those do that are programs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.process_tree import children_of
from harness.ranks.forkserver import ForkServer, ForkServerError
from tests.forked_servers import forks_of

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


def test_servers_are_programs_again_outside(rank_server: ForkServer) -> None:
    with forks_of(rank_server):
        pass
    with closing(ForkServer(())) as server:
        server.await_ready()
        assert server.pid in children_of(os.getpid())
