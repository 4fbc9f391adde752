"""The fork server between its driver and the signals of a scheduler."""

from __future__ import annotations

import os
import signal
from contextlib import closing

from harness.ranks.forkserver import ForkServer


def test_the_signal_before_a_time_limit_ends_neither_server_nor_child() -> None:
    with closing(ForkServer(())) as server:
        server.await_ready()
        os.kill(server.pid, signal.SIGUSR2)
        pid = server.start("time:sleep", 3600)
        server.signal(pid, signal.SIGUSR2)
        server.signal(pid, signal.SIGTERM)
        died = server.next_death(60)
    assert died is not None
    assert (died.pid, died.code) == (pid, -signal.SIGTERM)
