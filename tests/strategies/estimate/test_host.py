"""Marking of host memory."""

from __future__ import annotations

import pytest

from strategies.estimate.host import allocating_on_host, host_allocation


def test_allocation_is_marked_inside_only() -> None:
    assert not allocating_on_host()
    with host_allocation():
        assert allocating_on_host()
        with host_allocation():
            assert allocating_on_host()
        assert allocating_on_host()
    assert not allocating_on_host()


def test_the_mark_goes_when_the_allocation_fails() -> None:
    with pytest.raises(MemoryError), host_allocation():
        raise MemoryError
    assert not allocating_on_host()
