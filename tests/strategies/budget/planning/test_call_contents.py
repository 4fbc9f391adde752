"""Contents that writes part: predicted bytes and FLOPs, and plain gradients, of any decisions about them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.budget.eager.planned_block import PlannedBlock, PlannedModule
from strategies.budget.plan import BlockPlan
from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_plans import block_plan
from strategies.budget.planning.block_program import PlannedCall, planned_call
from strategies.budget.planning.simulation import PLAIN, Decision, Work, peak_bytes
from strategies.regions.host_copies import HostLedger
from strategies.regions.region import enclose
from tests.strategies.budget.planning.test_simulation import Flops
from tests.strategies.budget.small_steps import WIDTH, WithBlocks, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured

HALF = WIDTH // 2


def gates(x: Tensor, h: Tensor) -> Tensor:
    """Return the next state of a GRU whose gates write in place, as those of torch do."""
    r, z, n = torch.cat([x, h, x + h], -1).unsafe_chunk(3, -1)
    n.add_(r.sigmoid_() * h).tanh_()
    return n + z.sigmoid_() * (h - n)


def halves(x: Tensor, _: Tensor) -> Tensor:
    y = x + 0.1
    first = y[..., :HALF].sigmoid()
    y[..., :HALF].mul_(0.5)
    y[..., HALF:].tanh_()
    return torch.cat([first, y[..., HALF:]], -1) * y


def parts(x: Tensor, h: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :2], y[:, 2:] = x[:, :2].exp() * 0.1, h[:, 2:]
    return y.tanh() * y.relu_()


def several(x: Tensor, h: Tensor) -> Tensor:
    y, z = x + 1, h * 0.5
    before = y.exp() * 0.1 + z.tanh()
    torch._foreach_mul_([z, y], 0.5)
    return y + z + before


def given_out(x: Tensor, h: Tensor) -> Tensor:
    y = x.detach().exp()
    before = y + 1
    torch.mul(h.detach(), 0.1, out=y)
    return x * 0.5 + y * before * 0.1


def copied_over(x: Tensor, h: Tensor) -> Tensor:
    y = x * 2
    before = y.exp() * 0.1
    between = y.copy_(h.tanh()).sum(-1, keepdim=True)
    return y.add_(before).sigmoid() * between * 0.1


def noise(x: Tensor, _: Tensor) -> Tensor:
    drawn = torch.rand_like(x)
    return (x + drawn) * drawn.mul_(0.5)


def attention(x: Tensor, h: Tensor) -> Tensor:
    scores = x @ h.transpose(-1, -2) / 4
    largest = scores.amax(-1, keepdim=True).detach()
    scores.sub_(largest).exp_()
    return (scores / scores.sum(-1, keepdim=True)) @ x


def statistics(x: Tensor, _: Tensor) -> Tensor:
    y = functional.batch_norm(x.transpose(1, 2), torch.zeros(WIDTH), torch.ones(WIDTH), training=True)
    return y.relu_().transpose(1, 2)


WRITES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gates in place": gates,
    "halves in place": halves,
    "part by part": parts,
    "several in place": several,
    "given as out": given_out,
    "copied over": copied_over,
    "noise in place": noise,
    "attention in place": attention,
    "statistics in place": statistics,
    "added to itself": lambda x, _: x.add_(x.tanh()),
    "dropped in place": lambda x, _: x.tanh() + functional.dropout(x, 0.2, inplace=True),
    "scaled after it was read": lambda x, h: (x + h).tanh() * h.sigmoid() + (h * 2).mul_(0.3),
}


class Writing(nn.Module):
    """Linear layers around a function that writes in place."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self._body = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), body

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self._body(self.first(x), self.second(x)).tanh()
        return outputs


class Writers(WithBlocks):
    """Two such blocks, and a third one that runs untouched."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor], blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Writing(body) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def drawn(call: PlannedCall, chance: random.Random) -> Decision:
    """Return a decision that keeps, moves, drops or makes anew some of what it may."""
    program, share = call.program, chance.choice([0, 0.3, 0.6, 0.9])
    bits = program.runs.bits_of
    some = frozenset(s for s in range(len(program.nbytes)) if chance.random() < share) - program.older
    moved = frozenset(s for s in some & program.movable if chance.random() < 0.3)
    completed = program.completed_bits(bits(some - moved | program.pinned), bits(moved))
    keep = frozenset(program.runs.storages_in(completed))
    anew = frozenset(s for s in program.fleeting_chains - keep - moved if chance.random() < 0.5)
    return Decision(keep=keep, offload=moved, again=anew)


def stepped(model: Writers, x: Tensor) -> list[Tensor]:
    """Return the gradients of three steps."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        step_of(model, x)()
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(0.1 * (0 if each.grad is None else each.grad))
    return found


@pytest.mark.parametrize("body", WRITES.values(), ids=WRITES)
def test_any_decision_has_the_predicted_bytes_and_flops_and_the_plain_gradients(
    body: Callable[[Tensor, Tensor], Tensor],
) -> None:
    chance, model, x = random.Random(0), Writers(body), torch.randn(2, 4, WIDTH)
    graph, expected = captured(model, x), stepped(copy.deepcopy(model), x)
    first, *others = (
        CallOptions(graph, planned_call(graph, call), _flops, random_state_bytes=5056) for call in graph.calls
    )
    for _ in range(12):
        option = first.option(drawn(first.call, chance))
        effects = [option.effect, *(each.option(PLAIN).effect for each in others)]
        plan = block_plan(first.call, option)

        def planned(plan: BlockPlan = plan) -> Writers:
            found = copy.deepcopy(model)
            if not plan.plain:
                block = PlannedBlock(plan=plan, ledger=HostLedger())
                enclose(found.blocks[plan.fqn], PlannedModule(block=block))
            return found

        made = planned()
        torch.manual_seed(1)
        measured = measured_peak_bytes(made, [x], step_of(made, x))
        assert (option.decision, measured) == (option.decision, peak_bytes(graph, effects))
        with Flops() as flops:
            step_of(made, x)()
        assert flops.count == graph.flops + option.effect.flops
        assert all(map(torch.equal, expected, stepped(planned(), x)))


def _flops(work: Work) -> float:
    return work.flops


class Noted(WithBlocks):
    """One block that writes to its input or its own value in place."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Detached(body)])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers[0](x * 1)
        return outputs


class _Detached(Writing):
    def forward(self, x: Tensor) -> Tensor:
        return self._body(x, self.first(x.detach()))


def asks_in_forward(_: Tensor, h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.sigmoid().sum(), h, retain_graph=True)
    before = h.sin().detach()
    return h.relu_() * before + gradient.detach()


@pytest.mark.parametrize(
    ("body", "older", "pinned", "lasting"),
    [
        pytest.param(lambda _, h: h.view(-1).relu_().view_as(h), 0, 0, 0, id="a view is no reader"),
        pytest.param(lambda _, h: h.detach().sin() * h.relu_(), 1, 0, 0, id="a value that was read before"),
        pytest.param(lambda x, h: x.relu_() * h.sin(), 1, 0, 0, id="an input, which is copied"),
        pytest.param(asks_in_forward, 0, 3, 0, id="a gradient that forward takes"),
    ],
)  # fmt: skip
def test_what_a_write_parts(
    body: Callable[[Tensor, Tensor], Tensor], older: int, pinned: int, lasting: int
) -> None:
    graph = captured(Noted(body), torch.randn(2, 8, WIDTH))
    program = planned_call(graph, graph.calls[0]).program
    stay = sum(not unit.is_repeatable for unit in program.units)
    assert (len(program.older), len(program.pinned), stay) == (older, pinned, lasting)
    assert program.older.isdisjoint(program.movable | program.droppable)


def test_what_reads_an_older_content_that_is_not_made_again_is_not_either() -> None:
    graph = captured(Noted(lambda _, h: h.detach().sin() * h.relu_()), torch.randn(2, 8, WIDTH))
    call = graph.calls[0]
    graph.operators[call.operators[0]].is_repeatable = False
    program = planned_call(graph, call).program
    assert [unit.is_repeatable for unit in program.units] == [False, False, False, True]
    assert program.completed(frozenset()) <= frozenset(range(len(program.nbytes))) - program.older


def test_no_cut_keeps_an_older_content() -> None:
    graph = captured(Writers(gates), torch.randn(2, 4, WIDTH))
    call = planned_call(graph, graph.calls[0])
    caller = CallOptions(graph, call, _flops, random_state_bytes=5056)
    assert call.program.older
    for option in caller.all():
        assert option.decision.resident.isdisjoint(call.program.older)
