"""A trivial model for sweeps of the harness itself, which leaves a trace of every start of a trial.

`model=python model.factory=tests.slurm.starts:counted`; traces go to the folder that `ACBENCH_STARTS` names.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from torch import Tensor, nn

VARIABLE = "ACBENCH_STARTS"
_WIDTH = 8


class Tiny(nn.Module):
    """An embedding, one block, and a head over 256 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH)])
        self.head = nn.Linear(_WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) of tokens (B, S)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        logits: Tensor = self.head(x)
        return logits


def counted() -> nn.Module:
    """Return the model; in rank 0 of a trial, leave `<trial_id>.<process>` in the folder of traces.

    A rank makes the model several times, variant and twin, and leaves one trace.
    """
    if os.environ.get("RANK") == "0":  # the driver makes the model too, to check it
        log = Path("/proc/self/fd/1").readlink()  # <outputs>/<name>/<trial_id>/rank0.log
        Path(os.environ[VARIABLE], f"{log.parent.name}.{os.getpid()}").touch()
    return Tiny()


def starts_of(folder: Path) -> Counter[str]:
    """Return how often each trial has started, by trial_id; 0 for one that is not there."""
    return Counter(path.name.partition(".")[0] for path in folder.iterdir())
