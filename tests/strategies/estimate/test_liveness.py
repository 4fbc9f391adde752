"""The simulator of live storages."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.estimate.liveness import StorageStep, simulate


def step(makes: dict[Any, int], holds: str = "", private_bytes: int = 0) -> StorageStep:
    return StorageStep(makes=makes, holds=frozenset(holds), private_bytes=private_bytes)


@pytest.mark.parametrize(
    ("steps", "kept", "live"),
    [
        pytest.param([], "", [], id="nothing runs"),
        pytest.param([step({"a": 4}), step({"b": 2}, "a")], "b", [4, 6], id="a lives until it is used"),
        pytest.param([step({"a": 4}), step({"b": 2}), step({}, "b")], "", [4, 2, 2], id="nobody uses a"),
        pytest.param([step({"a": 4}), step({"b": 2})], "a", [4, 6], id="an output lives on"),
        pytest.param(
            [step({"a": 4}, private_bytes=3), step({}, "a")], "", [7, 4], id="workspace of one step"
        ),
        pytest.param([step({}, "x"), step({"a": 1}, "x")], "", [0, 1], id="inputs have no bytes"),
    ],
)
def test_bytes_alive(steps: list[StorageStep], kept: str, live: list[int]) -> None:
    profile = simulate(steps, kept)
    assert list(profile.live_bytes) == live
    assert profile.peak_bytes == max(live, default=0)


def test_the_first_step_of_the_peak_is_named() -> None:
    assert simulate([step({"a": 1}), step({"b": 3}), step({"c": 3})], ()).peak_step == 1
