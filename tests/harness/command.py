"""The program in a fork of a process that has imported it: a command without two seconds of imports."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias, cast

from harness import cli
from harness.ranks.forkserver import ForkServer

PRELOAD = (__name__,)
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
    with tempfile.TemporaryDirectory(prefix="command-") as name:
        stdout, stderr = Path(name, "stdout"), Path(name, "stderr")
        command = _Command(
            folder=folder,
            arguments=arguments,
            environment=environment,
            stdout=stdout,
            stderr=stderr,
            program=program,
        )
        pid = server.start(f"{__name__}:run", command)
        died = server.next_death(PATIENCE_S)
        assert died is not None, f"{arguments}: did not end within {PATIENCE_S:g} s"
        assert died.pid == pid
        return Finished(code=died.code, stdout=stdout.read_text("utf-8"), stderr=stderr.read_text("utf-8"))


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
        {"acbench": cli.main, "acbench-plan": cli.plan}[command.program]()
    except SystemExit as error:
        code = cast("int", error.code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
