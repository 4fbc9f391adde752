"""Options that came later: left out where they have their default, in every group."""

from __future__ import annotations

from typing import Any

import pytest

from harness.records.later_options import CAME_LATER, without_later


@pytest.mark.parametrize("group", CAME_LATER)
def test_defaults_are_left_out(group: str) -> None:
    later = dict(CAME_LATER[group])
    assert without_later(group, {"older": 1, **later}) == {"older": 1}


@pytest.mark.parametrize(
    ("group", "options"),
    [
        pytest.param("", {"microbatches": 2}, id="another value"),
        pytest.param("ac", {"keep": ("*.attn",), "keep_last": 1}, id="a tuple that is not empty"),
        pytest.param("chunk", {"keep": []}, id="another group"),
        pytest.param("mesh", {"tp": 1}, id="an option that has always been there"),
    ],
)
def test_what_is_asked_for_stays(group: str, options: dict[str, Any]) -> None:
    assert without_later(group, options) == options


def test_a_tuple_is_the_list_that_json_makes_of_it() -> None:
    assert without_later("ac", {"keep": ()}) == {}
