"""Plans of shardings freeze the heap themselves, and first count what is frozen, which takes its time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Let nothing be frozen."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
