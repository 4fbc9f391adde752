"""Random number generators: seeded for one step of one rank, and left as they were found."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_SEED_BYTES = 7  # torch accepts every seed of up to 63 bits
_NUMPY_SEEDS = 1 << 32


@contextmanager
def seeded(seed: int, *, step: int, dp_rank: int, device: torch.device) -> Iterator[None]:
    """Seed the generators from all three numbers within the scope; afterwards they are as before.

    Ranks of one tensor-parallel group share `dp_rank`, and so their dropout masks. Seeded are torch's CPU
    generator, that of `device`, Python's and NumPy's global one, which layer dropping and routing may use.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    step_seed = int.from_bytes(digest[:_SEED_BYTES], "little")
    is_cuda = device.type == "cuda"
    with restored_generators([device] if is_cuda else []):
        # not torch.manual_seed: it would also seed the other devices of the process
        torch.default_generator.manual_seed(step_seed)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(step_seed)
        random.seed(step_seed)
        np.random.seed(step_seed % _NUMPY_SEEDS)  # noqa: NPY002 (models draw from the global generator)
        yield


@contextmanager
def restored_generators(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Leave the generators of torch, of CUDA `devices`, Python and NumPy as they were found."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 (as above)
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002 (as above)


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the state of every generator that `seeded` sets: `cpu`, on CUDA `cuda`, `python` and `numpy`.

    Those of Python and NumPy are their words, the position among them, and whether a normal number is held
    back: both make two at a time, so that one and two draws end at the same position.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states | {"python": _python_state(), "numpy": _numpy_state()}


def _python_state() -> Tensor:
    _, words, held_back = random.getstate()
    return torch.tensor([*words, held_back is not None])


def _numpy_state() -> Tensor:
    state = np.random.get_state(legacy=False)  # noqa: NPY002 (as above)
    words = state["state"]
    return torch.tensor([*words["key"].tolist(), words["pos"], state["has_gauss"]])
