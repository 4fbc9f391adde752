"""The report of one node's agent on its ranks after their end: `node<N>.json`, never half written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from harness.records.fields import decode
from harness.records.files import write_atomically

HALTS = ("deadline", "time_limit", "peer", "terminated")


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The end of one rank's process.

    Fields:
        rank: rank in the whole trial.
        code: exit status; `-n` when signal n killed it.
        time: seconds of `time.time` on its node.
        ended: whether the agent ended it, because the trial was over already.
        kind, message: class and text of the exception that ended it, where it told the fork server of one.
    """

    rank: int
    code: int
    time: float
    ended: bool = False
    kind: str | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """Why an agent ends ranks that have not failed.

    Fields:
        kind: `deadline`: the trial's own time is over; `time_limit`: that of the scheduler's job is;
            `peer`: another node has ended its ranks; `terminated`: somebody ends this node's agent.
        message: one clause, with which the message of the outcome starts.
        error_kind: kind of the outcome's error where this is its cause (`SIGTERM`, `CANCELLED`); it does not
            count where time is over, whose kind is `timeout`.

    Raises:
        ValueError: an unknown kind.
    """

    kind: str
    message: str
    error_kind: str = "lost"

    def __post_init__(self) -> None:
        if self.kind not in HALTS:
            raise ValueError(f"Halt.kind: must be one of {', '.join(HALTS)}, got {self.kind!r}")

    @property
    def is_timeout(self) -> bool:
        """True if the trial's deadline or the job's time limit has passed."""
        return self.kind in ("deadline", "time_limit")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """The end of one node's share of a trial.

    Fields:
        time: time at which the ranks had ended or the halt came, in seconds of `time.time` on this node.
        deaths: deaths of its ranks, in order of time.
        halt: halt that ended ranks which had not failed; `None` if they ended by themselves or one failed.
        waiting: ranks that were in a collective at the halt.
        places: where its ranks were at the halt, a phrase for each that said so.
    """

    node_rank: int
    host: str
    time: float
    deaths: tuple[Death, ...] = ()
    halt: Halt | None = None
    waiting: tuple[int, ...] = ()
    places: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: object) -> Self:
        """Return the report whose `dataclasses.asdict` is this JSON value.

        Raises:
            ValueError: it is none; the message names the path.
        """
        return decode(cls, value, "node report")

    def write(self, folder: Path) -> None:
        """Replace the node's file in `folder` at once."""
        write_atomically(
            folder / f"node{self.node_rank}.json", json.dumps(asdict(self)), within=folder.parent
        )
