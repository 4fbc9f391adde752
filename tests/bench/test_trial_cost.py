from __future__ import annotations

import pytest

from bench.overhead.trial_cost import trial, watched_functions


def test_what_is_watched_is_there() -> None:
    names = [f"{module.__name__}.{name}" for module, name, _ in watched_functions()]
    assert len(set(names)) == len(names)
    assert all(callable(getattr(module, name, None)) for module, name, _ in watched_functions()), names


@pytest.mark.matrix
def test_every_second_of_a_trial_is_of_one_part() -> None:
    words = ["model=mlp", "mesh=single", "ac=full", "mesh.device=cpu", "tracker=none", "protocol=smoke"]
    parts = trial([*words, "protocol.timed_pairs=1", "protocol.parity_steps=1"])
    assert {"steps under the meters", "steps for parity", "warm-up and timed steps", "build"} <= parts.keys()
    assert all(part["wall_s"] > 0 for part in parts.values())
