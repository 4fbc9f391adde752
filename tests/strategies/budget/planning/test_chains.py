"""Chains: which blocks may be one, what one holds that is left plain, and plans that no chain alone beats."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from strategies.budget.eager.carrying_out import enclose
from strategies.budget.planning.block_choice import Chained
from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_program import PlannedCall, planned_call
from strategies.budget.planning.chains import Chains, chained_call
from strategies.budget.planning.planner import Chosen, Planner
from strategies.budget.planning.simulation import PLAIN, Decision, effect_of, peak_bytes
from strategies.regions.blocks import ModelModules
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.planning.test_enumeration import Blocks, Residual, columns, linear
from tests.strategies.budget.small_steps import Gated, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured

ROWS = 256


def handing_on_what_is_free() -> list[nn.Module]:
    return [Residual(nn.Sequential(linear(16, 16), nn.GELU())) for _ in range(3)]


def handing_on_what_is_saved() -> list[nn.Module]:
    return [nn.Sequential(linear(a, b), nn.Tanh()) for a, b in ((16, 32), (32, 64), (64, 128))]


class Growing(nn.Module):
    """Adds a few channels to those that it reads, of a value that is dear to make, and small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(linear(width, 128), nn.ReLU(), linear(128, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], -1)


def handing_on_what_follows_from_less() -> list[nn.Module]:
    return [Growing(16 + 4 * number) for number in range(3)]


class Widening(nn.Module):
    """Saves what follows for nothing from its input, and not the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(16, 256)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.inner(x.tanh()).relu().unflatten(-1, (16, 16)).sum(-1)
        return outputs


def handing_on_what_is_read_for_nothing() -> list[nn.Module]:
    return [Widening() for _ in range(3)]


class Between(Blocks):
    """Writes to what blocks hand on."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x).mul_(2)
        return x


def graph_of(blocks: list[nn.Module], kind: type[Blocks] = Blocks) -> StepGraph:
    return captured(kind(blocks), torch.randn(ROWS, 16))


def chains_of(graph: StepGraph) -> list[tuple[int, int]]:
    def caller_of(call: PlannedCall, known: Sequence[Decision] = ()) -> CallOptions:
        return CallOptions(graph, call, lambda effect: effect.flops, random_state_bytes=0, known=known)

    callers = [caller_of(planned_call(graph, call)) for call in graph.calls]
    options = [[caller.option(PLAIN)] for caller in callers]
    return [(each.start, each.end) for each in Chains(graph, callers, options, caller_of).all()]


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        pytest.param(lambda: graph_of(handing_on_what_is_free()), [(0, 3), (0, 2)], id="free"),
        pytest.param(lambda: graph_of(handing_on_what_is_saved()), [(0, 3), (0, 2)], id="saved"),
        pytest.param(
            lambda: graph_of(handing_on_what_follows_from_less()), [(0, 3), (0, 2)], id="follows from less"
        ),
        pytest.param(
            lambda: graph_of(handing_on_what_is_read_for_nothing()), [(0, 3), (0, 2)], id="read for nothing"
        ),
        pytest.param(lambda: captured(Gated(), torch.randn(2, 8, 16)), [], id="dearer than all of a block"),
        pytest.param(lambda: graph_of(handing_on_what_is_free(), Between), [], id="written to between"),
    ],
)
def test_blocks_are_a_chain_where_it_gains_something(
    graph: Callable[[], StepGraph], found: list[tuple[int, int]]
) -> None:
    assert chains_of(graph()) == found


@pytest.mark.parametrize(
    "blocks", [handing_on_what_is_free, handing_on_what_is_saved, handing_on_what_follows_from_less]
)
@pytest.mark.parametrize("span", [(0, 2), (1, 3), (0, 3)])
def test_a_plain_chain_holds_what_its_blocks_hold_alone(
    blocks: Callable[[], list[nn.Module]], span: tuple[int, int]
) -> None:
    graph = graph_of(blocks())
    alone = Counter[int]()
    for call in graph.calls[slice(*span)]:
        alone.update(effect_of(planned_call(graph, call), PLAIN, random_state_bytes=0).gains)
    chain = effect_of(chained_call(graph, *span), PLAIN, random_state_bytes=0).gains
    assert +chain == +alone
    assert -chain == -alone


@pytest.mark.parametrize("blocks", [handing_on_what_is_free, handing_on_what_is_saved])
def test_no_decision_about_all_blocks_as_one_is_cheaper(blocks: Callable[[], list[nn.Module]]) -> None:
    graph = graph_of(blocks())
    effects = columns(chained_call(graph, 0, len(graph.calls)))
    known = [(peak_bytes(graph, [effect]), effect.flops) for effect in effects]
    planner = Planner(graph)
    smallest, plain = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    assert smallest <= min(peak for peak, _ in known)
    for share in (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95):
        budget = int(smallest + share * (plain - smallest))
        cheapest = min((flops for peak, flops in known if peak <= budget), default=None)
        assert cheapest is None or planner.plan(budget).extra_flops <= cheapest, share


def test_what_is_next_to_a_chain_is_never_plain() -> None:
    planner = Planner(graph_of(handing_on_what_is_free()))
    stages, spans = list(planner._stages), list(planner._spans)
    caller = planner._chains[0]
    near = [
        caller.option(Decision(keep=caller.call.program.saved - {each})) for each in caller.call.program.saved
    ]
    assert any(each.decision.is_plain for each in caller.refined(near, set()))
    chosen = [Chosen(start=0, option=each, effect=each.effect, span=0) for each in near]
    planner._extend(stages, spans, chosen, defaultdict(set))
    chains = [span for span in spans if isinstance(span, Chained)]
    assert chains
    assert not any(each.decision.is_plain for span in chains for each in span.stage.options)


class WithSkip(nn.Module):
    """Gives its output, and a sum of skips."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = linear(16, 64), linear(64, 256)

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x.tanh()).sigmoid()
        return x + y.unflatten(-1, (16, 4)).sum(-1), skip + self.outer(y)


class Skips(Blocks):
    """Adds up skips, from zeros that the model lets go of when the first block has read them."""

    def forward(self, x: Tensor) -> Tensor:
        skip = x.new_zeros(ROWS, 256)
        for block in self.layers:
            x, skip = block(x, skip)
        return skip.sum(-1)


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_what_a_chain_holds_of_what_the_model_lets_go_is_predicted(share: float) -> None:
    x, planned = torch.randn(ROWS, 16), Skips([WithSkip() for _ in range(3)])
    planner = Planner(captured(Skips([WithSkip() for _ in range(3)]), x))
    room = planner.plain_peak_bytes - planner.minimum_feasible_bytes
    plan = planner.plan(planner.minimum_feasible_bytes + int(share * room))
    assert any("chain" in block.why for block in plan.blocks)
    enclose(plan, ModelModules(blocks=planned.blocks))
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plan.predicted_peak_bytes
