from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from strategies import StrategyError
from strategies.estimate.machine import A100
from strategies.shard.model.graph import ModelGraph, Node, TensorAxis
from strategies.shard.model.graph_building import model_graph
from strategies.shard.model.module_options import LeafModule, NodeOption
from strategies.shard.model.placement_state import TensorValue
from tests.strategies.shard.model.odd_models import axis, built, inputs
from tests.strategies.shard.models import AXIS, SAMPLE, SPLITS, Chain, Tied, graph, meta

LINEAR = ["RR = RR x RR", "RR = RS0 x S0R", "RS0 = RR x RS0", "S0R = S0R x RR_0", "S0R = S0R x RR_1"]
WAYS = [
    pytest.param("embedding", ["S0", "S1", "replicated"], id="embedding by batch and sequence"),
    pytest.param("blocks.0.norm", ["S0", "S1", "replicated"], id="norm by batch and sequence"),
    pytest.param("blocks.0.up", LINEAR, id="all candidates of a linear"),
    pytest.param("head", LINEAR, id="those of one that is not split too"),
]


def _leaf(fqn: str, model: type[nn.Module] = Chain) -> Node:
    return next(node for node in graph(model).nodes if node.leaf is not None and node.leaf.fqn == fqn)  # type: ignore[arg-type]  # a class is hashable, mypy thinks of its instances


def _names(node: Node) -> list[str]:
    return sorted({option.candidate.name for option in node.options if option.candidate is not None})


def _states(node: Node, position: str) -> list[str]:
    states = [option.inputs[0] if position == "input" else option.output for option in node.options]
    return sorted({str(state) for state in states})


@pytest.mark.parametrize(("fqn", "names"), WAYS)
def test_leaf_modules_run_in_these_ways(fqn: str, names: list[str]) -> None:
    assert _names(_leaf(fqn)) == names


@pytest.mark.parametrize(
    ("fqn", "input_states", "output_states"),
    [
        pytest.param("blocks.0.up", ["R", "R*", "S0", "S1"], ["R", "R*", "S0", "S1", "S2"], id="column"),
        pytest.param("blocks.0.down", ["R", "R*", "S0", "S1", "S2"], ["R", "R*", "S0", "S1"], id="row"),
        pytest.param("head", ["R", "R*", "S0", "S1"], ["R", "R*", "S0", "S1"], id="neither"),
        pytest.param("embedding", ["R", "S0"], ["R", "R*", "S0", "S1"], id="tokens have no gradient"),
    ],
)
def test_features_are_sharded_where_the_model_says_so(
    fqn: str, input_states: list[str], output_states: list[str]
) -> None:
    node = _leaf(fqn)
    assert (_states(node, "input"), _states(node, "output")) == (input_states, output_states)


def test_a_tied_parameter_is_not_split() -> None:
    assert _names(_leaf("head", Tied)) == ["RR = RR x RR", "S0R = S0R x RR_0", "S0R = S0R x RR_1"]


def test_a_module_called_twice_takes_what_it_gets() -> None:
    class Twice(Chain):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in (self.blocks[0], self.blocks[0]):
                x = block(x)
            logits: Tensor = self.head(x)
            return logits

    leaves = [node.leaf.fqn for node in graph(Twice).nodes if node.leaf is not None]
    assert leaves == ["embedding", "head"]


def test_patterns_match_name_by_name() -> None:
    axis = TensorAxis(ranks=2, splits={"blocks.*.up": "column"})
    fqns = ("blocks.0.up", "blocks.0.ups", "blocks.0.moe.up", "up")
    assert [axis.split(fqn) for fqn in fqns] == ["column", None, None, None]


def test_memory_counts_parameters_gradients_and_outputs() -> None:
    def held(option: NodeOption) -> int:
        return option.memory_bytes

    node = _leaf("blocks.0.up")
    parameters, output = (16 * 8 + 16) * 4, 4 * 6 * 16 * 4
    by_states = {
        (str(o.inputs[0]), o.candidate.name, str(o.output)): held(o)
        for o in node.options
        if o.candidate is not None
    }
    assert by_states["R", "RR = RR x RR", "R"] == 2 * parameters + output
    assert by_states["R", "RS0 = RR x RS0", "S2"] == parameters + output // 2
    assert by_states["S0", "S0R = S0R x RR_0", "S0"] == 2 * parameters + output // 2
    assert by_states["S0", "RR = RR x RR", "R"] == 2 * parameters + output + 4 * 6 * 8 * 4


def test_a_frozen_parameter_needs_no_reduction() -> None:
    model = meta(Chain)
    model.get_parameter("blocks.0.norm.weight").requires_grad_(False)
    found = model_graph(model, (torch.zeros(4, 6, dtype=torch.int64),), AXIS, A100)
    node = next(node for node in found.nodes if node.name == "blocks.0.norm")
    option = next(
        option
        for option in node.options
        if option.candidate is not None
        and option.candidate.choice == "b0"
        and str(option.inputs[0]) == str(option.output) == "S0"
    )
    assert [each.operand for each in option.collectives] == ["bias"]


def _odd(name: str) -> ModelGraph:
    return model_graph(built(name), (inputs(),), axis(4), A100)


def test_a_parameter_that_its_own_module_reads_may_get_summands() -> None:
    """The norm is seen through, down to functions, so that rows may be sharded."""
    node = next(node for node in _odd("own norm").nodes if node.parameter == "norm.weight")
    whole, summed = node.options
    assert (str(whole.output), whole.collectives) == ("R", ())
    assert str(summed.output) == "R*"
    assert [(each.phase, each.kind, each.payload_bytes) for each in summed.collectives] == [
        ("backward", "all_reduce", 16 * 8)
    ]


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        pytest.param("weight in a function", "up.weight", id="of a module that is called as well"),
        pytest.param("words", "position", id="of a module with submodules"),
        pytest.param("penalty of weights", "norm.weight", id="read by another module"),
    ],
)
def test_a_parameter_that_is_read_elsewhere_is_whole(name: str, parameter: str) -> None:
    attribute = parameter.replace(".", "_")
    node = next(node for node in _odd(name).nodes if node.name == attribute)
    assert [str(option.output) for option in node.options] == ["R"]


def test_hooks_see_wholes() -> None:
    handed = [node for node in _odd("hook after a block").nodes if "seen_by_hooks" in node.place]
    assert len(handed) == 2  # in and out
    assert all([str(option.output) for option in node.options] == ["R"] for node in handed)


def test_hooks_that_see_what_nobody_knows_are_refused() -> None:
    class Result:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Inner(nn.Sequential):
        def forward(self, x: Tensor) -> Result:
            return Result(super().forward(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(nn.Linear(2, 2))
            self.inner.register_forward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            result: Result = self.inner(x)
            return result.tensor

    with pytest.raises(StrategyError) as refusal:
        model_graph(Outer(), (torch.zeros(2, 2),), AXIS, A100)
    assert str(refusal.value) == (
        "shard: needs a forward that can be followed; "
        "forward of the model hands a Result to hooks of 'inner', which may see shards in it; "
        "use shard=none and mesh.tp=1"
    )


def test_blocks_that_are_built_alike_stand_in_one_place() -> None:
    nodes = [node for node in _odd("two blocks").nodes if node.name.endswith(".up")]
    assert len(nodes) == 2
    assert len({node.place for node in nodes}) == 1


def test_hooks_on_all_modules_are_refused() -> None:
    hook = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(StrategyError) as refusal:
            _odd("plain")
    finally:
        hook.remove()
    message = "needs a process without hooks on all modules, which would see other calls; remove them"
    assert str(refusal.value) == f"shard: {message}"


def test_data_dependent_sizes_are_refused() -> None:
    class Picks(Chain):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens[tokens > 0].unsqueeze(0))

    with pytest.raises(StrategyError) as refusal:
        graph(Picks)
    line = Picks.forward.__code__.co_firstlineno + 1
    followed = f"needs sizes that do not depend on data; those of 'getitem' at test_graph.py:{line} do"
    message = str(refusal.value)
    assert message.endswith("; use shard=none and mesh.tp=1")
    # torch 2.11 does not run an embedding of such a size
    assert followed in message or "data-dependent expression" in message


def test_a_forward_that_cannot_be_recorded_is_refused() -> None:
    class Reads(Chain):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens + int(tokens.max()))

    with pytest.raises(StrategyError) as refusal:
        graph(Reads)
    assert str(refusal.value).startswith("shard: needs a forward that can be followed; forward of the model ")


def test_a_leaf_is_what_is_known_of_it() -> None:
    leaf = _leaf("blocks.0.down").leaf
    assert leaf is not None
    assert leaf == LeafModule(
        fqn="blocks.0.down",
        module=leaf.module,
        input=TensorValue(shape=(4, 6, 16), dtype=torch.float32, needs_gradient=True),
        output=TensorValue(shape=(4, 6, 8), dtype=torch.float32, needs_gradient=True),
        split="row",
        parameter_bytes={"weight": 2 * 8 * 16 * 4, "bias": 2 * 8 * 4},
        fsdp_bytes={"weight": 0, "bias": 0},
    )


class _Partly(Chain):
    """Tied weights, a module of which nothing is known, and parameters that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[0].norm = nn.GroupNorm(6, 6)
        self.head.weight.requires_grad_(False)
        self.spare = nn.Parameter(torch.zeros(3))


def test_parameters_are_counted_once_whoever_reads_them() -> None:
    tied, unknown, spare = 80 * 4, 2 * (6 + 6) * 4, 2 * 3 * 4
    assert graph(_Partly).resident_bytes == tied + unknown + spare
    assert graph(Chain).resident_bytes == 0


def test_fsdp_keeps_shards_of_parameters_in_their_own_dtype() -> None:
    axis = TensorAxis(ranks=2, splits=SPLITS, parameter_shards=3, parameter_itemsize=4)
    assert axis.resting_bytes(nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))) == 27
    frozen = nn.Parameter(torch.zeros(10), requires_grad=False)
    assert axis.resting_bytes(frozen) == 14


def test_what_needs_no_gradient_costs_no_backward() -> None:
    model = meta(Chain)
    whole = graph(Chain)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = model_graph(model, SAMPLE, AXIS, A100)
    seconds = [sum(node.options[0].seconds for node in each.nodes) for each in (whole, frozen)]
    assert seconds[0] == pytest.approx(3 * seconds[1])
