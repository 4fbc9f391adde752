from __future__ import annotations

import io
import logging
import threading
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strategies.estimate.anatomy import attributes, has_hidden_content, is_closed, kind_of, put_attributes
from tests.strategies.held_kinds import HELD, Child, Slotted

_INDIRECT = ("array of objects", "deep", "method of an object", "partial")
"""What changes there is held by another object."""


def _content(value: Any) -> Any:
    kind = kind_of(value)
    return None if kind is None else kind.read(value)


@pytest.mark.parametrize(
    "name",
    [name for name in HELD if kind_of(HELD[name][0]()) is not None and "attribute" not in name],
)
def test_a_content_is_read_and_written_back(name: str) -> None:
    make, change = HELD[name]
    value = make()
    kind = kind_of(value)
    assert kind is not None
    before = kind.read(value)
    is_direct = kind.write is not None and name not in _INDIRECT
    assert kind.is_current(value, before) == (kind.form != "generator")
    change(value)
    assert kind.is_current(value, before) == (not is_direct)
    if kind.write is not None and is_direct:
        kind.write(value, before)
        assert str(kind.read(value)) == str(_content(make()))


@pytest.mark.parametrize("make", [Slotted, Child, lambda: SimpleNamespace(calls=0)])
def test_attributes_are_put_back_and_new_ones_go(make: Any) -> None:
    value = make()
    before = attributes(value)
    assert "calls" in before
    value.calls = 1
    if isinstance(value, Slotted):
        value.empty = 1
    else:
        value.new = 1
    assert attributes(value) != before
    put_attributes(value, before)
    assert attributes(value) == before


@pytest.mark.parametrize(
    ("value", "is_hidden"),
    [
        pytest.param(SimpleNamespace(), False, id="an object"),
        pytest.param(Slotted(), False, id="an object with slots"),
        pytest.param(Child(), False, id="slots of two classes"),
        pytest.param([], False, id="a known kind"),
        pytest.param(MappingProxyType({}), False, id="a view of a dictionary"),
        pytest.param(threading.Lock(), True, id="a lock"),
        pytest.param(io.BytesIO(), True, id="a file"),
        pytest.param(iter([1]), True, id="an iterator"),
        pytest.param(np.random.SeedSequence(0), True, id="an object of an extension"),
        pytest.param(type("Mine", (io.BytesIO,), {})(), True, id="a subclass of a file"),
    ],
)
def test_what_hides_something_is_told(value: Any, is_hidden: bool) -> None:
    assert has_hidden_content(value) == is_hidden


def test_loggers_are_closed_and_containers_are_not() -> None:
    assert is_closed(logging.getLogger("a"))
    assert not is_closed([])
    assert not is_closed(Slotted())
