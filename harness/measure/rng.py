"""Random number generators: seeded for one step of one rank, and left as they were found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from strategies import generators

_SEED_BYTES = 7  # torch accepts every seed of up to 63 bits


@contextmanager
def seeded(seed: int, *, step: int, dp_rank: int, device: torch.device) -> Iterator[None]:
    """Seed the generators from all three numbers within the scope; afterwards they are as before.

    Ranks of one tensor-parallel group share `dp_rank`, and so their dropout masks. Seeded are torch's CPU
    generator, that of `device`, Python's and NumPy's global one, which layer dropping and routing may use.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    step_seed = int.from_bytes(digest[:_SEED_BYTES], "little")
    with generators.restored():
        generators.seed(step_seed, device)
        yield


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the state of each generator that `seeded` sets: type of its device, `python` and `numpy`.

    Those of Python and NumPy are their words, the position among them, and whether a normal number is held
    back: both make two at a time, so that one and two draws end at the same position.
    """
    states = {each.name.partition(":")[0]: each.read() for each in generators.of_devices([device])}
    _, words, held_back = generators.PYTHON.read()
    states["python"] = torch.tensor([*words, held_back is not None])
    _, words, position, is_held_back, _ = generators.NUMPY.read()
    states["numpy"] = torch.tensor([*words.tolist(), position, is_held_back])
    return states
