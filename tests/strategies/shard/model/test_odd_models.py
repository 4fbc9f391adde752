"""Models that read sizes, share, hook, subclass and write in place are sharded right, or refused by name."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from strategies import StrategyError
from strategies.estimate.machine import A100
from strategies.shard.model.choice import megatron
from strategies.shard.model.graph import Choice, ModelGraph, kind_of_inputs
from strategies.shard.model.graph_building import model_graph
from strategies.shard.model.module_options import NodeOption
from strategies.shard.model.shard_plan import ShardPlan
from strategies.shard.model.solver import Limits, cheapest
from tests.covering import marked
from tests.rank_pool import RankPool
from tests.strategies.shard.model import odd_ranks
from tests.strategies.shard.model.odd_models import MODELS, axis, built, inputs

_SLOW = replace(A100, latency_s=0.0, flops_per_s=1e6, link_bytes_per_s=3e9)
_BETWEEN = (
    "the code between the linears that the model's tensor parallel plan splits is not known to run on a "
    "shard of features: "
)
_OTHERWISE = "needs code that does on a shard what it does on the whole; "
_NONE = "needs linears that the model's tensor parallel plan splits; "
REFUSED = {
    # model | why it does not run as Megatron would have it
    "divides by features": _OTHERWISE
    + "'div' at odd_models.py is called with 2.8284271247461903, on the whole with 5.656854249492381",
    "divides by elements": _OTHERWISE + "'div' at odd_models.py is called with 256, on the whole with 1024",
    "views to numbers": _OTHERWISE
    + "'view' at odd_models.py fails: RuntimeError: shape '[4, 8, 32]' is invalid for input of size 256",
    "keeps a tensor": _OTHERWISE + "somebody else keeps what 'up' at odd_models.py gives",
    "returns a size": _OTHERWISE + "it returns 256 for 1024",
    "heads by number": _OTHERWISE + "'div' at odd_models.py is called with 2, on the whole with 8",
    "makes a mask": _BETWEEN + "'matmul' at odd_models.py reads 'up', 'transpose'",
    "adds new zeros": _BETWEEN + "'new_zeros' at odd_models.py reads 'up'",
    "views with strides": _BETWEEN + "'as_strided' at odd_models.py reads 'contiguous'",
    "sorts": _BETWEEN + "'sort' at odd_models.py reads 'up'",
    "splits features": _BETWEEN + "'chunk' at odd_models.py reads 'up'",
    "turns features": _BETWEEN + "'roll' at odd_models.py reads 'up'",
    "normalises over the batch": _BETWEEN + "'var' at odd_models.py reads 'up'",
    "softmax over features": _BETWEEN + "'softmax' at odd_models.py reads 'up'",
    "einsum": _BETWEEN + "'einsum' at odd_models.py reads 'up', 'relu'",
    "several outputs": _BETWEEN + "'mean' at odd_models.py reads 'up'",
    "buffers": _BETWEEN + "'add' at odd_models.py reads 'mul_', 'mean'",
    "writes into a tensor": _BETWEEN + "'setitem' at odd_models.py reads 'zeros_like', 'mul'",
    "linear with another forward": _BETWEEN + "'up' has another forward than nn.Linear",
    "linear that calls its parent": _BETWEEN + "'up' has another forward than nn.Linear",
    "row linear that calls its parent": _BETWEEN + "'down' has another forward than nn.Linear",
    "linear with a further parameter": _BETWEEN + "'up' has another forward than nn.Linear",
    "weight norm": _BETWEEN + "'up' has other parameters than nn.Linear, or computes them",
    "spectral norm": _BETWEEN + "'down' has other parameters than nn.Linear, or computes them",
    "hook before a linear": _BETWEEN + "'up' has hooks, which would see shards",
    "hook of a parameter": _BETWEEN + "'up' has a parameter that others read, or that has hooks",
    "shared linear": _BETWEEN + "'blocks.0.up' is called 2 times",
    "tied weights": _BETWEEN + "'blocks.0.up' has a parameter that others read, or that has hooks",
    "weight in a function": _BETWEEN + "'up' has a parameter that others read, or that has hooks",
    "forward without a call": _BETWEEN + "'up' has its forward called directly, too",
    "penalty of weights": _BETWEEN + "'up' has a parameter that others read, or that has hooks",
    "shared block": _NONE + "'blocks.0.gate' is called 2 times",
    "sequential": _NONE + "it has none",
}


_BY_OTHER_PLANS = (
    "keeps a tensor",
    "splits features",
    "buffers",
    "weight norm",
    "tied weights",
    "shared block",
)
"""Models that no Megatron plan suits and of which other plans are tried by default: one a reason."""


@pytest.mark.parametrize(
    "name",
    marked([(name,) for name in MODELS], [(n,) for n in MODELS if n not in REFUSED or n in _BY_OTHER_PLANS]),
)
def test_every_plan_computes_what_the_plain_model_does(pool4: RankPool, name: str) -> None:
    plans = dict(_plans(name))
    assert ("megatron" in plans) == (name not in REFUSED)
    expected: list[list[str]] = [[] for _ in plans]
    assert pool4.run(odd_ranks.differences, name, list(plans.values())) == [expected] * 4


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=REFUSED)
def test_what_is_in_the_way_of_a_shard_of_features_is_named(name: str, message: str) -> None:
    with pytest.raises(StrategyError) as refusal:
        megatron(_graph(name))
    remedy = "" if message.startswith(_NONE) else "; use shard=none and mesh.tp=1"
    assert re.sub(r"(?<=\.py):\d+", "", str(refusal.value)) == f"shard: {message}{remedy}"


_READ = (
    ", which forward reads, is not what it was when the model was sharded; change it before, and plan for it"
)
CHANGED = {
    "nothing": "accepted",
    "another batch": "shard: the model is called with inputs of another structure or shape, with another "
    "constant, with one tensor in two places, or with inputs that want gradients, than it was sharded for; "
    "use inputs like the sample",
    "another mode": f"shard: 'dropout.training'{_READ}",
    "a hook": f"shard: 'up._forward_hooks'{_READ}",
    "a forward": f"shard: 'up.forward'{_READ}",
    "another module": f"shard: 'up'{_READ}",
    "another method": f"shard: 'between'{_READ}",
    "a parametrisation": f"shard: 'up.forward'{_READ}",
}


@pytest.mark.parametrize(("what", "message"), CHANGED.items(), ids=CHANGED)
def test_what_was_not_planned_for_is_refused(pool4: RankPool, what: str, message: str) -> None:
    plan = dict(_plans("dropout at the end"))["megatron"]
    assert pool4.run(odd_ranks.refusal, "dropout at the end", plan, what) == [message] * 4


def test_what_was_frozen_stays_so(pool4: RankPool) -> None:
    plan = dict(_plans("frozen block"))["megatron"]
    message = "wants a gradient, which it did not when the model was sharded; thaw it before, and plan for it"
    for refusal in pool4.run(odd_ranks.refusal, "frozen block", plan, "thawed"):
        assert refusal.endswith(message)


def test_inputs_that_are_one_tensor_are_another_call() -> None:
    one, other = inputs(), inputs()
    assert kind_of_inputs((one, one), {}) != kind_of_inputs((one, other), {})
    assert kind_of_inputs((one, other), {}) != kind_of_inputs((one, other.clone().requires_grad_()), {})
    assert kind_of_inputs((one, 1), {}) != kind_of_inputs((one, 2), {})
    assert kind_of_inputs((one, other), {}) == kind_of_inputs((other, one.float()), {})


def test_regions_are_recorded_on_parts(pool4: RankPool) -> None:
    """The heads are repeated by numbers that a region takes for constant."""
    plan = dict(_plans("repeated heads"))["megatron"]
    labels = {"norm": [0], "up.q": [0], "up.k": [0], "up.v": [0], "down": [0]}
    assert pool4.run(odd_ranks.in_regions, "repeated heads", plan, labels) == [[]] * 4


@cache
def _graph(name: str) -> ModelGraph:
    return model_graph(built(name), (inputs(),), axis(4), _SLOW)


def _plans(name: str) -> Iterator[tuple[str, ShardPlan]]:
    """Yield Megatron's plan, or else the cheapest, and the cheapest by times drawn at random."""
    graph = _graph(name)
    if name not in REFUSED:
        yield "megatron", _plan(graph, megatron(graph))
    else:
        yield "cheapest", _plan(graph, cheapest(graph, Limits()))
    yield "random", _plan(graph, cheapest(_shuffled(graph, random.Random(name)), Limits()))


def _plan(graph: ModelGraph, choice: Choice | None) -> ShardPlan:
    assert choice is not None
    return ShardPlan.of(graph, choice, 4)


def _shuffled(graph: ModelGraph, generator: random.Random) -> ModelGraph:
    def shuffled(option: NodeOption) -> NodeOption:
        return replace(option, seconds=generator.random())

    return replace(
        graph,
        nodes=tuple(replace(node, options=tuple(map(shuffled, node.options))) for node in graph.nodes),
    )
