"""The program in a fork of a process that has imported it: a command without four seconds of imports.

Its fork servers are forks as well. That a server begins as a program of its own is for the tests of
`tests/harness/ranks`, and for commands that are started as people start them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, cast

from harness.command_line import cli
from harness.launchers import run_task
from harness.ranks import agent
from harness.ranks.forkserver import ForkServer
from tests.forked_servers import Child, close_all_but, starting

PRELOAD = (__name__, *agent.PRELOAD, *run_task.PRELOAD)
PATIENCE_S = 240.0

Program: TypeAlias = Literal["acbench", "acbench-plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """What a command came to."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    folder: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    stdout: Path
    stderr: Path
    program: Program


def acbench(
    server: ForkServer,
    folder: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    program: Program = "acbench",
) -> Finished:
    """Run a program in `folder` to its end, in a fork of `server`, which has imported `PRELOAD`."""
    (finished,) = at_once(server, folder, [arguments], environment, program)
    return finished


def at_once(
    server: ForkServer,
    folder: Path,
    commands: Sequence[tuple[str, ...]],
    environment: dict[str, str],
    program: Program = "acbench",
) -> list[Finished]:
    """Run several commands in `folder` at the same time, each in a fork of `server`, to the end of all."""
    with tempfile.TemporaryDirectory(prefix="command-") as name:
        started = {}
        for number, arguments in enumerate(commands):
            command = _Command(
                folder=folder,
                arguments=arguments,
                environment=environment,
                stdout=Path(name, f"stdout{number}"),
                stderr=Path(name, f"stderr{number}"),
                program=program,
            )
            started[server.start(f"{__name__}:run", command)] = command
        codes: dict[int, int] = {}
        while len(codes) < len(started):
            died = server.next_death(PATIENCE_S)
            assert died is not None, f"{commands}: did not end within {PATIENCE_S:g} s"
            codes[died.pid] = died.code
        return [
            Finished(
                code=codes[pid],
                stdout=command.stdout.read_text("utf-8"),
                stderr=command.stderr.read_text("utf-8"),
            )
            for pid, command in started.items()
        ]


def run(command: _Command) -> NoReturn:
    """Be the program: with its folder, environment, words and streams, and its exit status."""
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    for number, path in ((1, command.stdout), (2, command.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv[:] = [command.program, *command.arguments]
    code = 0
    try:
        with starting(_ForkedServer):
            {"acbench": cli.main, "acbench-plan": cli.plan}[command.program]()
    except SystemExit as error:
        code = cast("int", error.code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _ForkedServer(Child):
    """The fork server of a command."""

    def __init__(
        self, words: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> None:
        super().__init__()
        if self.pid == 0:
            os.setsid()
            os.environ.update(env)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            close_all_but({0, 1, 2, *pass_fds})
            exec(words[-1], {})  # the program of `ForkServer`, which never returns
            os._exit(1)
