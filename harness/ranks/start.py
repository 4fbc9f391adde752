"""What a rank is told at its start; no torch, because those who tell it need none."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

Rendezvous = Path | tuple[str, int]
"""Where ranks meet: a file, or host and port of a store."""

STACK_SIGNAL = signal.SIGUSR2  # NCCL may use SIGUSR1
"""Asks a rank to write the stacks of its threads to its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    """All that a rank is told at its start.

    Fields:
        trial_dir: existing folder for log and report.
        entry: `package.module:function`, called as `entry(payload, context)`; returns JSON values.
        payload: pickled; it is unpickled where a failure becomes a report.
        rank, local_rank, world_size: the usual.
        device: `cpu` or `cuda`; a rank takes the CUDA device of its local rank.
        backend: of the process group; `None`: no group.
        rendezvous: file of the store on one node, host and port of the store on several; `None`: no group.
        timeout_s: of collectives; the trial's deadline, so that the agent is always first.
        threads: of intra-operator parallelism.
        cores: CPUs that the rank may run on; `None`: those of the agent.
    """

    trial_dir: Path
    entry: str
    payload: bytes
    rank: int
    local_rank: int
    world_size: int
    device: str
    backend: str | None
    rendezvous: Rendezvous | None
    timeout_s: float
    threads: int
    cores: tuple[int, ...] | None = None
