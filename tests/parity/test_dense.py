"""A tensor parallel plan is proven against the dense model, which no plan splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from tests.parity import cases, split_models
from tests.rank_pool import RankPool

_DENSE = "ac=none chunk=none shard=none against the dense model in fp32"
WRONG = [
    # block | first difference | first module with a wrong output
    pytest.param("FusedQueries", "output 'outputs'", "layers.0.down", id="queries, keys and values fused"),
    pytest.param("MeanOfFeatures", "output 'outputs'", "layers.0.down", id="a mean of a shard of features"),
    pytest.param("NormOfHeads", "gradient of 'layers.1.norm'", "", id="a gradient of a rank's own heads"),
]


def _case(
    block: str, mesh: str = "tp2", variant: str = "none", shard: str = "none", **options: Any
) -> Experiment:
    case = cases.experiment(
        mesh=cases.MESHES[mesh], variant=variant, shard=shard, parity_steps=1, sequence_length=8
    )
    return replace(case, model=split_models.spec(block, **options))


@pytest.mark.parametrize(("block", "difference", "module"), WRONG)
def test_a_wrong_plan_differs_though_the_twin_has_it_too(
    pool2: RankPool, block: str, difference: str, module: str
) -> None:
    for parity in pool2.run(cases.parity, _case(block)):
        assert (parity.first, parity.level) == (None, "bitwise")  # variant and twin are one
        (dense,) = parity.chain
        assert str(dense.compared) == _DENSE
        assert dense.first_module == module
        (sentence,) = parity.differences()
        assert sentence.startswith(f"parity: {difference} differs first")
        named = f"; the first module with a wrong output is '{module}' ({_DENSE})"
        assert sentence.endswith(named if module else f" ({_DENSE})")
        assert dense.blamed


@pytest.mark.parametrize(
    ("block", "options"),
    [
        pytest.param("Split", {"variant": "full"}, id="dropout on shards, of the model's own"),
        pytest.param("FusedHeads", {"shard": "megatron"}, id="fused heads"),
        pytest.param(
            "FusedHeads", {"shard": "candidate", "is_tied": True}, id="a tied head beside candidates"
        ),
        pytest.param("NormOfHeads", {"tp_summed": ("layers.*",)}, id="a norm of heads, summed over ranks"),
    ],
)
def test_a_right_plan_is_neutral(pool2: RankPool, block: str, options: dict[str, Any]) -> None:
    for parity in pool2.run(cases.parity, _case(block, **options)):
        assert list(parity.differences()) == []
        assert str(parity.chain[-1].compared) == _DENSE
        assert parity.chain[-1].outputs.max_rel < 1e-5


def test_replicas_are_compared_as_wholes(pool4: RankPool) -> None:
    found = pool4.run(cases.parity, _case("Split", mesh="ddp2_tp2"))
    assert [list(parity.differences()) for parity in found] == [[]] * 4
