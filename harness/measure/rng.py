"""Random number generators: seeded for one step of one rank, and left as they were found."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SEED_BYTES = 7  # torch accepts every seed of up to 63 bits


@contextmanager
def seeded(seed: int, *, step: int, dp_rank: int, device: torch.device) -> Iterator[None]:
    """Seed the generators from all three numbers within the scope; afterwards they are as before.

    Ranks of one tensor-parallel group share `dp_rank`, and so their dropout masks. Seeded are torch's CPU
    generator, that of `device`, and Python's, which layer dropping and routing may use.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    step_seed = int.from_bytes(digest[:_SEED_BYTES], "little")
    python_state = random.getstate()
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_cuda else [], device_type="cuda"):
        # not torch.manual_seed: it would also seed the other devices of the process
        torch.default_generator.manual_seed(step_seed)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(step_seed)
        random.seed(step_seed)
        try:
            yield
        finally:
            random.setstate(python_state)


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the state of every generator that `seeded` sets: `cpu`, the device's by its name, `python`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    _, words, _ = random.getstate()
    return states | {"python": torch.tensor(words)}
