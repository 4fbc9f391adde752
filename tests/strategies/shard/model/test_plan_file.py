from __future__ import annotations

import json
from pathlib import Path

import pytest

from strategies import StrategyError
from strategies.shard.base import Sharding
from strategies.shard.candidate import OneCandidate
from strategies.shard.cheapest import Cheapest
from strategies.shard.megatron import Megatron
from strategies.shard.model.plan_file import load, save
from strategies.shard.model.shard_plan import ShardPlan
from tests.rank_pool import RankPool
from tests.strategies.shard import placed_ranks
from tests.strategies.shard.models import AXIS, SAMPLE, Chain, Tied, meta

_SLOW = {"latency_s": 0.0, "flops_per_s": 1e6, "bandwidth_bytes_per_s": 3e9}


def _plan(strategy: Sharding, model: type[Chain] = Chain) -> ShardPlan:
    plan = strategy.plan(meta(model), SAMPLE, AXIS)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Megatron(), id="megatron"),
        pytest.param(OneCandidate(candidate="S0R = S0R x RR_1"), id="sequence"),
        pytest.param(Cheapest(**_SLOW), id="cheapest"),  # type: ignore[arg-type]
    ],
)
def test_a_plan_is_read_as_it_was_written(tmp_path: Path, strategy: Sharding) -> None:
    plan = _plan(strategy)
    assert plan.python is not None
    save(plan, tmp_path / "plan.json")
    found = load(tmp_path / "plan.json")
    assert found == plan
    assert found.as_json() == plan.as_json()


def test_a_read_plan_computes_what_the_dense_model_does(tmp_path: Path, pool2: RankPool) -> None:
    path = tmp_path / "plan.json"
    found = pool2.run(placed_ranks.examine_file, Megatron(), path)
    assert [(wrong, promised == done) for wrong, promised, done in found] == [([], True)] * 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(
            Tied,
            "shard: the plan was made for a model in which 'head.weight' is missing, got (10, 8); "
            "plan this model",
            id="a tied head",
        ),
    ],
)
def test_a_plan_of_another_model_is_refused_by_the_first_parameter_that_differs(
    pool2: RankPool, model: type[Chain], message: str
) -> None:
    assert pool2.run(placed_ranks.refusal_of_plan, _plan(Megatron(), model)) == [message] * 2


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="another JSON"),
        pytest.param(json.dumps({"format": "acbench sharding plan 0", "plan": {}}), id="another version"),
        pytest.param(
            json.dumps({"format": "acbench sharding plan 2", "plan": {"is": "Path"}}), id="another class"
        ),
    ],
)
def test_a_file_without_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StrategyError) as refusal:
        load(path)
    assert str(refusal.value) == (
        f"shard: '{path}' holds no plan of this version, 'acbench sharding plan 2'; save it again"
    )
