"""torchtitan: what its policies cost once `switch_on` has called them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'acbench[torchtitan]'")

from strategies import Strategy
from strategies.ac.full import Full
from strategies.ac.selective_op import SelectiveOp
from strategies.ac.torchtitan import Torchtitan
from tests.strategies.foreign.models import BLOCKS, assert_costs_the_same, llama, refusal


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(
            Torchtitan(**BLOCKS),
            SelectiveOp(**BLOCKS, save_ops="torchtitan", early_stop=False),
            id="selective",
        ),
        pytest.param(Torchtitan(**BLOCKS, policy="full"), Full(**BLOCKS, early_stop=False), id="full"),
    ],
)
def test_it_costs_what_the_same_of_ours_costs(theirs: Strategy, ours: Strategy) -> None:
    assert_costs_the_same(theirs, ours)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"policy": "half"},
            "ac.policy: must be one of full, selective, got 'half'",
            id="an unknown policy",
        ),
        pytest.param(
            {"force_recompute_mm_shapes_by_fqns": 3},
            "ac.force_recompute_mm_shapes_by_fqns: must be a list of names, got 3",
            id="no list of names",
        ),
        pytest.param(
            BLOCKS | {"force_recompute_mm_shapes_by_fqns": ["norm"]},
            "ac: torchtitan raised ValueError: force_recompute_mm_shapes_by_fqns expected to match a "
            "nn.Linear, but got: LlamaRMSNorm((16,), eps=1e-06)",
            id="what torchtitan refuses",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    assert refusal("torchtitan", llama(), **fields) == message
