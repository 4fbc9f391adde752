"""Plans of shardings freeze the heap themselves, and first count what is frozen, which takes its time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
