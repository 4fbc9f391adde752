"""What can go wrong with a trial, and what its record must then say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ON_SLURM = ("slurm", "slurm_packed")
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "local lanes": ("hydra.launcher.max_parallel=2", "hydra.launcher.share_cores=true"),
    "slurm": (),
    "slurm_packed": (),
}
"""Columns of the matrix, and the options of `hydra/launcher` that make them."""

SHAPES: Mapping[str, str] = {"1x1": "single", "1x2": "shard2", "2x2": "two_nodes"}
"""Nodes x ranks on each, and the mesh that has them."""

LAST_RANK: Mapping[str, int] = {"1x1": 0, "1x2": 1, "2x2": 3}


def is_refused(launcher: str, shape: str) -> bool:
    """Whether the launcher does not take the shape."""
    return shape == "2x2" and launcher not in ON_SLURM


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a record must say.

    Fields:
        status: of the trial.
        kind: of its error; `None` where there is none.
        is_named: whether the last rank is the culprit; otherwise nobody is.
        phase: of the error.
    """

    status: str
    kind: str | None = None
    is_named: bool = False
    phase: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One fault.

    Fields:
        name: of the row.
        factory: of `tests.matrix.faults.models`.
        group: cases of one group run in one sweep.
        expected: of its record.
        kinds: the error's kind by launcher, where it is not the expected one.
        launchers, shapes: where it can happen.
        absence: why it cannot happen elsewhere.
    """

    name: str
    factory: str
    group: str
    expected: Expected
    kinds: Mapping[str, str] = field(default_factory=dict)
    launchers: tuple[str, ...] = tuple(LAUNCHERS)
    shapes: tuple[str, ...] = tuple(SHAPES)
    absence: str = ""

    def expects(self, launcher: str, shape: str) -> tuple[str, str | None, int | None, str | None]:
        """Return status, kind, rank and phase of the record."""
        if is_refused(launcher, shape):
            return "refused", "ConfigError", None, None
        expected = self.expected
        rank = LAST_RANK[shape] if expected.is_named else None
        return expected.status, self.kinds.get(launcher, expected.kind), rank, expected.phase

    def is_at(self, launcher: str, shape: str) -> bool:
        """Whether the matrix has a cell here."""
        return launcher in self.launchers and shape in self.shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What the cases of one sweep share.

    Fields:
        deadline_s: of every trial.
        options: of the command.
    """

    deadline_s: float = 120.0
    options: tuple[str, ...] = ()


GROUPS: Mapping[str, Group] = {
    "by itself": Group(),
    "while planned": Group(options=("chunk=minimum",)),
    "hang": Group(deadline_s=20.0),
    "scancel": Group(),
    # Slurm looks at time limits every 30 s, and sends signals up to 60 s early
    "time limit": Group(options=("hydra.launcher.time_min=5", "hydra.launcher.signal_delay_s=30")),
    "killed at limit": Group(options=("hydra.launcher.time_min=5", "hydra.launcher.signal_delay_s=0")),
    "node down": Group(),
    "agent 0 killed": Group(),
    "agent 1 killed": Group(),
    "agent 1 frozen": Group(),
    "preempted": Group(options=("hydra.launcher.partition=low",)),
}


def _own(name: str, factory: str, kind: str, *, status: str = "failed", phase: str = "instrument") -> Case:
    expected = Expected(status=status, kind=kind, is_named=True, phase=phase)
    return Case(name=name, factory=factory, group="by itself", expected=expected)


def _well(name: str, factory: str) -> Case:
    return Case(name=name, factory=factory, group="by itself", expected=_OK)


def _hanging(name: str, factory: str) -> Case:
    expected = Expected(status="timeout", kind="timeout", is_named=True, phase="instrument")
    return Case(name=name, factory=factory, group="hang", expected=expected)


def _refused(name: str, factory: str, group: str = "by itself") -> Case:
    return Case(name=name, factory=factory, group=group, expected=_REFUSED)


def _outside(name: str, status: str, kind: str, *, is_named: bool = False) -> Case:
    expected = Expected(status=status, kind=kind, is_named=is_named, phase="instrument")
    return Case(
        name=name,
        factory="hang",
        group=name,
        expected=expected,
        launchers=ON_SLURM,
        absence="needs a scheduler",
    )


_OK = Expected(status="ok")
_AGENT_KILLED = Expected(status="lost", kind="SIGKILL", phase="instrument")
_REFUSED = Expected(status="refused", kind="ConfigError")
_AGENT_GONE = Expected(status="lost", kind="lost", phase="instrument")
CASES = (
    Case(name="ok", factory="ok", group="by itself", expected=_OK),
    Case(name="slow start", factory="slow_start", group="by itself", expected=_OK),
    _own("error while building", "build_error", "ConfigError", phase="build"),
    _own("Python error", "python_error", "RuntimeError"),
    _own("Python error in parity", "parity_error", "RuntimeError", phase="parity"),
    _own("OOM", "oom", "RuntimeError", status="oom"),
    _own("SIGKILL", "sigkill", "SIGKILL"),
    _own("SIGSEGV", "sigsegv", "SIGSEGV"),
    _own("_exit", "hard_exit", "exit 3"),
    _own("exit 0", "exit_0", "exit 0"),
    _own("SIGABRT", "sigabrt", "SIGABRT"),
    _own("SystemExit", "system_exit", "SystemExit"),
    _own("KeyboardInterrupt", "keyboard_interrupt", "KeyboardInterrupt"),
    _own("own BaseException", "own_base_exception", "_OwnError"),
    _own("error in backward", "backward_error", "RuntimeError"),
    _own("endless recursion", "recursion", "RecursionError"),
    _own("Python's memory", "memory_error", "MemoryError", status="oom"),
    _own("half characters", "half_characters", "FileNotFoundError"),
    _own("message of 20 MB", "long_message", "RuntimeError"),
    _own("hostile message", "hostile_message", "RuntimeError"),
    _own("__str__ raises", "mute_error", "_MuteError"),
    _own("error without pickle", "heavy_error", "_HeavyError"),
    _own("stderr broken", "broken_stderr", "RuntimeError"),
    _own("streams closed", "closed_streams", "RuntimeError"),
    _own("log closed", "closed_descriptors", "RuntimeError"),
    _own("stderr is None", "no_stderr", "RuntimeError"),
    _own("no descriptors", "no_descriptors", "RuntimeError"),
    _own("folder removed", "no_folder", "RuntimeError", phase="build"),  # its reports went with it
    _own("junk reports", "junk_reports", "RuntimeError"),
    _own("group killed", "group_killed", "SIGKILL"),
    _own("daemon left, exit", "daemon_and_exit", "exit 4"),
    Case(
        name="fork server killed",
        factory="server_killed",
        group="by itself",
        expected=Expected(status="lost", kind="lost"),
    ),
    _well("folder as record", "folder_as_record"),
    _well("forked twin", "forked_twin"),
    _well("hidden children", "hidden_children"),
    _well("environment overwritten", "overwritten_environment"),
    _well("umask 777", "closed_mask"),
    _well("abort at exit", "abort_at_exit"),
    _well("thread left", "thread_left"),
    _refused("factory raises in driver", "driver_error"),
    _refused("factory exits driver", "driver_exit"),
    _refused("error while planned", "planning_error", "while planned"),
    _hanging("hang", "hang"),
    _hanging("frozen rank", "stopped"),
    _hanging("deaf hang", "deaf"),
    _hanging("interpreter held", "lock_held"),
    _outside("scancel", "lost", "CANCELLED"),
    _outside("time limit", "timeout", "timeout", is_named=True),
    _outside("killed at limit", "timeout", "TIMEOUT"),
    _outside("node down", "lost", "NODE_FAIL"),
    Case(
        name="agent 0 killed",
        factory="hang",
        group="agent 0 killed",
        expected=_AGENT_KILLED,
        kinds={"slurm": "FAILED"},
        launchers=("local lanes", *ON_SLURM),
        absence="its agent is the driver",
    ),
    Case(
        name="agent 1 killed",
        factory="hang",
        group="agent 1 killed",
        expected=_AGENT_GONE,
        launchers=ON_SLURM,
        shapes=("2x2",),
        absence="there is one node",
    ),
    Case(
        name="agent 1 frozen",
        factory="hang",
        group="agent 1 frozen",
        expected=_AGENT_GONE,
        launchers=ON_SLURM,
        shapes=("2x2",),
        absence="there is one node",
    ),
    Case(
        name="preempted",
        factory="hang_once",
        group="preempted",
        expected=_OK,
        launchers=ON_SLURM,
        absence="needs a scheduler",
    ),
)
