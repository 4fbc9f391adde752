"""What a peer is: a name, a setting, and what it does to a plain model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.peers.workload import Workload
from harness.trial.assemble import Assembled


class CannotRunError(Exception):
    """A peer does not run here; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One setting of one peer.

    Fields:
        name: of the peer.
        setting: its options, as people write them; empty where it has none.
        change: puts it on a plain trainee, in place.
        overrides: of the experiment, for peers that stand in the compiler.
    """

    name: str
    setting: str = ""
    change: Callable[[Workload, Assembled], None] = lambda _workload, _trainee: None
    overrides: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether it stands in the compiler."""
        return bool(self.overrides)
