"""Instructions that ranks get at their start; no torch, because their senders need none."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rendezvous = Path | tuple[str, int]
"""Where ranks meet: a file, or host and port of a store."""

STACK_SIGNAL = signal.SIGUSR2  # NCCL may use SIGUSR1
"""Asks a rank to write the stacks of its threads to its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """The ranks of one trial on this node.

    Fields:
        trial_dir: folder for logs and reports; created when missing.
        entry: `package.module:function`, called in every rank as `entry(payload, context)`.
        payload: argument of the entry; it pickles.
        ranks: number of ranks on this node, >= 1.
        world_size: number of ranks of the whole trial; `None` is `ranks`.
        node_rank: index of this node, which holds ranks `node_rank * ranks` and following.
        rendezvous: host and port of the store that node 0 hosts (`nodes.hosted`), known before the ranks
            start; `None` on one node, where the agent makes a file.
        deadline_s: longest time in seconds from the start of the ranks to their last result, and of a
            collective.
        device: `cpu` or `cuda`.
        backend: backend of the process group; `None` is gloo on cpu and nccl on cuda where there are several
            ranks, and no group where there is one.
        threads_per_rank: number of intra-operator threads of a rank.
        cores: CPUs that the ranks of this node share; `None` is those of the agent.
    """

    trial_dir: Path
    entry: str
    payload: Any
    ranks: int
    deadline_s: float
    world_size: int | None = None
    node_rank: int = 0
    rendezvous: Rendezvous | None = None
    device: str = "cpu"
    backend: str | None = None
    threads_per_rank: int = 1
    cores: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse numbers of ranks that do not go together."""
        if self.ranks < 1:
            raise ValueError(f"RankJob.ranks: must be at least 1, got {self.ranks}")
        if self.total % self.ranks:
            problem = f"RankJob.world_size: must be a multiple of the {self.ranks} local ranks"
            raise ValueError(f"{problem}, got {self.total}")

    @property
    def total(self) -> int:
        """Ranks of the whole trial."""
        return self.ranks if self.world_size is None else self.world_size

    @property
    def nodes(self) -> int:
        """Machines of the whole trial."""
        return self.total // self.ranks

    @property
    def local(self) -> range:
        """The ranks on this node."""
        return range(self.node_rank * self.ranks, (self.node_rank + 1) * self.ranks)

    @property
    def group_backend(self) -> str | None:
        """The backend of the process group; `None`: no group."""
        if self.backend is None and self.total > 1:
            return "nccl" if self.device == "cuda" else "gloo"
        return self.backend


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    """All that one rank is told at its start.

    Fields:
        job: the ranks of its node, with the place where they meet (`None`: no group). Its payload is pickled;
            it is unpickled where a failure becomes a report.
        local_rank: index of the rank on its node; on CUDA also that of its device.
    """

    job: RankJob
    local_rank: int

    @property
    def rank(self) -> int:
        """The rank in the whole trial."""
        return self.job.local[self.local_rank]
