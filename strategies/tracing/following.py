"""Forwards followed without data take the branches that they take with data, where these can be known.

torch's encoder layers have a fused path for inference, whose insides no recorder and no meter sees. It is off
while a forward is followed, so that the layers run as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

from strategies.estimate.patched import replaced
from strategies.tracing.deep_copies import deep_copied
from strategies.tracing.shape_values import with_known_values


@contextmanager
def as_with_data() -> Iterator[None]:
    """Answer what depends on shapes alone, copy as with data, keep encoder layers off their fused path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with with_known_values(is_traced=True), replaced(FakeTensor, "__deepcopy__", deep_copied):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
