"""Networks that nobody has written: random blocks under random plans keep predicted bytes and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.budget.eager.carrying_out import enclose
from strategies.budget.planning.planner import Planner
from strategies.regions.blocks import ModelModules
from tests.strategies.budget.small_steps import WIDTH, WithBlocks, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured

SEEDS = [
    pytest.param(0, marks=pytest.mark.slow),
    *range(1, 5),
    *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(5, 120)),
]
HOST_BYTES = (0, 2000, 20_000)

MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.2),
}

FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda p, _: p.relu(),
    "tanh": lambda p, _: p.tanh(),
    "sigmoid": lambda p, _: p.sigmoid(),
    "gelu": lambda p, _: functional.gelu(p),
    "silu": lambda p, _: functional.silu(p),
    "softmax": lambda p, _: p.softmax(-1),
    "power": lambda p, _: p.square() * 0.2,
    "exponential": lambda p, _: (p * 0.1).exp(),
    "sum": lambda p, q: p + q,
    "difference": lambda p, q: p - 0.5 * q,
    "product": lambda p, q: p * q * 0.5,
    "detached": lambda p, q: p + q.detach(),
    "chosen": lambda p, q: torch.where(p > 0, p, q),
    "attention": lambda p, _: (p @ p.transpose(-1, -2) / WIDTH).softmax(-1) @ p,
    "running sum": lambda p, _: p.cumsum(1) * 0.3,
    "parts": lambda p, _: torch.cat([*reversed(p.chunk(2, -1))], -1),
    "reversed": lambda p, _: p[:, torch.arange(p.shape[1] - 1, -1, -1)],
    "transposed": lambda p, _: p.transpose(1, 2).reshape(p.shape),
    "copied into": lambda p, _: torch.empty_like(p).copy_(p.sin()),
    "added up": lambda p, _: torch.zeros_like(p).add_(p).mul_(1.1),
    "from a number": lambda p, q: torch.where(p > 0, q, torch.tensor(0.1)) / torch.sqrt(torch.tensor(WIDTH)),
    "some places": lambda p, _: p + p.index_select(1, torch.tensor([0, 0, 1, 2])).sum(1, keepdim=True),
    "masked": lambda p, q: p.masked_fill(_first_of(torch.zeros(WIDTH, dtype=torch.bool)), 0.25) + q,
    "by a table": lambda p, _: (
        p * torch.cos(torch.arange(p.shape[1]).unsqueeze(1) / torch.arange(1, 1 + WIDTH))
    ),
    "by what it holds": lambda p, q: q * (1 + p.detach().mean().item()),
    "relu in place": lambda p, _: functional.relu_(p),
    "scaled in place": lambda p, _: p.mul_(0.5),
    "shifted in place": lambda p, _: p.add_(0.1),
}


def _first_of(mask: Tensor) -> Tensor:
    mask[0] = True
    return mask


ENDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "residual": lambda x, y: x + y,
    "alone": lambda _, y: y,
    "gated": lambda x, y: x * y * 0.5,
    "bounded": lambda _, y: y.tanh(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The body of a block: names of functions or modules, each with two earlier values that it may read."""

    steps: tuple[tuple[str, int, int], ...]
    end: str

    @classmethod
    def drawn(cls, chance: random.Random) -> Recipe:
        """Return a random one; values that nobody reads are among them."""
        names = [*FUNCTIONS, *(list(MODULES) * 3)]
        steps = tuple(
            (chance.choice(names), chance.randrange(1 + number), chance.randrange(1 + number))
            for number in range(chance.randint(2, 10))
        )
        return cls(steps=steps, end=chance.choice([*ENDS]))


class RandomBlock(nn.Module):
    """Follows a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self.parts = nn.ModuleDict(
            {
                str(number): MODULES[name]()
                for number, (name, *_) in enumerate(recipe.steps)
                if name in MODULES
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for number, (name, first, second) in enumerate(self._recipe.steps):
            operands = values[first], values[second]
            is_module = name in MODULES
            values.append(self.parts[str(number)](operands[0]) if is_module else FUNCTIONS[name](*operands))
        return ENDS[self._recipe.end](x, values[-1])


UNUSED = {
    "a number": Recipe(
        steps=(("from a number", 0, 0), ("some places", 0, 0), ("sigmoid", 2, 0)), end="gated"
    ),
    "a dropout": Recipe(steps=(("from a number", 0, 0), ("dropout", 1, 0), ("sum", 0, 0)), end="gated"),
    "a dropout in a chain": Recipe(
        steps=(("power", 0, 0), ("dropout", 1, 0), ("linear", 1, 1), ("gelu", 3, 3)), end="residual"
    ),
}
"""Blocks with results that nobody uses, by what only these read."""


class RandomModel(WithBlocks):
    """Blocks of one or two recipes in any order, with or without operators between them."""

    def __init__(self, seed: int, known: Recipe | None = None) -> None:
        super().__init__()
        chance = random.Random(seed)
        recipes = [known or Recipe.drawn(chance) for _ in range(chance.choice([1, 1, 2]))]
        torch.manual_seed(0)
        self.layers = nn.ModuleList(RandomBlock(chance.choice(recipes)) for _ in range(chance.randint(2, 5)))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self._scales = [chance.choice([None, None, 1.01]) for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block, scale in zip(self.layers, self._scales, strict=True):
            x = block(x if scale is None else x * scale)
        return x


def trained(model: WithBlocks, x: Tensor) -> list[Tensor | None]:
    """Return the gradients of a step."""
    torch.manual_seed(1)
    step_of(model, x)()
    return [each.grad for each in model.parameters()]


def accepted(seed: int, x: Tensor) -> tuple[int, list[Tensor | None]]:
    """Return a network whose writes in place autograd accepts, by its number, and its gradients."""
    for each in range(1000 * seed, 1000 * (seed + 1)):
        try:
            return each, trained(RandomModel(each), x)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
    raise AssertionError("autograd accepts none")


@pytest.mark.parametrize("seed", SEEDS)
def test_random_networks_under_random_budgets(seed: int) -> None:
    chance = random.Random(seed)
    x = torch.randn(chance.choice([1, 2, 4]), chance.choice([4, 8]), WIDTH)
    network, expected = accepted(seed, x)
    graph = captured(RandomModel(network), x)
    for objective in ("flops", "time", "both"):
        planner = Planner(graph, objective=objective, host_bytes=chance.choice(HOST_BYTES))
        for share in (0.0, chance.random() ** 2, chance.random()):
            room = planner.plain_peak_bytes - planner.minimum_feasible_bytes
            plan = planner.plan(planner.minimum_feasible_bytes + int(share * room))
            planned = RandomModel(network)
            enclose(plan, ModelModules(blocks=planned.blocks))
            for one, other in zip(expected, trained(planned, x), strict=True):
                assert (one is None) == (other is None)
                assert one is None or other is None or torch.equal(one.nan_to_num(), other.nan_to_num())
            torch.manual_seed(1)
            measured = measured_peak_bytes(planned, [x], step_of(planned, x))
            assert measured == plan.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("recipe", UNUSED.values(), ids=UNUSED.keys())
def test_what_the_tape_holds_for_unused_results_is_predicted(recipe: Recipe) -> None:
    x = torch.randn(2, 4, WIDTH)
    planner = Planner(captured(RandomModel(0, recipe), x))
    for share in range(4):
        room = planner.plain_peak_bytes - planner.minimum_feasible_bytes
        plan = planner.plan(planner.minimum_feasible_bytes + share * room // 4)
        planned = RandomModel(0, recipe)
        enclose(plan, ModelModules(blocks=planned.blocks))
        assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plan.predicted_peak_bytes
