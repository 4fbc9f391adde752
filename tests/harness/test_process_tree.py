"""Who descends from whom, and who carries a mark."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.process_tree import MARK, children_of, end_marked
from tests.harness.processes import require_dead

_PARENT = """
import subprocess
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
input()
"""


def test_a_process_is_among_the_children_of_its_parent() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert process.pid in children_of(os.getpid())
        process.kill()
    assert process.pid not in children_of(os.getpid())


def test_what_carries_a_mark_ends_in_whatever_session() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", _PARENT],
            env=os.environ | {MARK: "this test"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as marked,
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: "another"}) as other,
    ):
        assert marked.stdout is not None
        hidden = int(marked.stdout.readline())
        end_marked("this test")
        assert (marked.wait(), other.poll()) == (-9, None)
        other.kill()
    require_dead(hidden)
