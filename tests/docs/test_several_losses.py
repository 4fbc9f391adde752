"""The table of docs/several_losses.md: each cell is run, so that the page says what happens."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, dropout, gelu

from strategies import Strategy, StrategyError, generators
from strategies import ac_variants as known_variants
from strategies.ac.file import File

PAGE = (Path(__file__).parents[2] / "docs/several_losses.md").read_text(encoding="utf-8")
WIDTH, ROWS, STEPS = 16, 256, 2
BLOCKS: Any = {"layers_fqn": "blocks"}


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.down(gelu(self.up(self.norm(x)))), 0.1)


class Network(nn.Module):
    def __init__(self, outputs: int, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x)
        return outputs


ac_variants: Any = known_variants

Networks = tuple[Network, Network]
Situation = Callable[[Network, Network, Tensor, Tensor], None]


def loss(outputs: Tensor, target: float) -> Tensor:
    return binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, target))


def one_loss(_g: Network, d: Network, real: Tensor, fake: Tensor) -> None:
    (loss(d(real), 1) + loss(d(fake), 0)).backward()


def two_in_flight(_g: Network, d: Network, real: Tensor, fake: Tensor) -> None:
    losses = loss(d(real), 1), loss(d(fake), 0)
    for each in losses:
        each.backward()


def one_by_one(_g: Network, d: Network, real: Tensor, fake: Tensor) -> None:
    loss(d(real), 1).backward()
    loss(d(fake), 0).backward()


def retain_graph(_g: Network, d: Network, real: Tensor, _fake: Tensor) -> None:
    outputs = d(real)
    loss(outputs, 1).backward(retain_graph=True)
    outputs.square().mean().backward()


def gradient_penalty(_g: Network, d: Network, real: Tensor, _fake: Tensor) -> None:
    x = real.clone().requires_grad_()
    (slope,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()


def frozen_d(g: Network, d: Network, _real: Tensor, z: Tensor) -> None:
    d.requires_grad_(requires_grad=False)
    loss(d(g(z)), 1).backward()
    d.requires_grad_(requires_grad=True)


def some_gradients(g: Network, d: Network, real: Tensor, z: Tensor) -> None:
    loss(d(g(z)), 1).backward(inputs=list(g.parameters()))
    parameters = list(d.parameters())
    for each, gradient in zip(parameters, torch.autograd.grad(loss(d(real), 1), parameters), strict=True):
        each.grad = gradient


SITUATIONS: dict[str, Situation] = {
    "one loss": one_loss,
    "two in flight": two_in_flight,
    "one by one": one_by_one,
    "retain_graph": retain_graph,
    "gradient penalty": gradient_penalty,
    "frozen D": frozen_d,
    "some gradients": some_gradients,
}
OF_D = ("one loss", "two in flight", "one by one", "retain_graph", "gradient penalty")
"""Situations that call no G."""


def networks(norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(WIDTH)) -> Networks:
    torch.manual_seed(1)
    return Network(WIDTH, norm), Network(1, norm)


def data() -> list[tuple[Tensor, Tensor]]:
    with generators.restored():
        torch.manual_seed(5)
        return [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(STEPS)]


Change = Callable[[Networks, str, Path], Networks]


def trained(
    situation: str,
    change: Change | None,
    folder: Path,
    norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(WIDTH),
) -> list[Tensor | None]:
    """Return gradients of all steps, parameters, buffers and the generator's state."""
    both = networks(norm)
    if change is not None:
        both = change(both, situation, folder)
    parameters = [each for network in both for each in network.parameters()]
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), list[Tensor | None]()
    torch.manual_seed(7)
    for real, z in data():
        optimizer.zero_grad()
        SITUATIONS[situation](*both, real, z)
        found += [None if each.grad is None else each.grad.clone() for each in parameters]
        optimizer.step()
    return [
        *found,
        *parameters,
        *(each for network in both for each in network.buffers()),
        torch.get_rng_state(),
    ]


@functools.cache
def plain(situation: str) -> list[Tensor | None]:
    return trained(situation, None, Path())


def are_equal(expected: list[Tensor | None], found: list[Tensor | None]) -> bool:
    pairs = zip(expected, found, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def by(strategy: Callable[[], Strategy]) -> Change:
    def change(both: Networks, _situation: str, _folder: Path) -> Networks:
        for network in both:
            strategy().apply(network)
        return both

    return change


def by_file(strategy: Any) -> Change:
    def change(both: Networks, _situation: str, folder: Path) -> Networks:
        for number, network in enumerate(both):
            file = folder / f"apply_{number}.py"
            file.write_text(
                strategy.view("file", copy.deepcopy(network), (torch.randn(ROWS, WIDTH),)), encoding="utf-8"
            )
            File(path=str(file)).apply(network)
        return both

    return change


def of_page() -> dict[str, Any]:
    """Return what the code of the page defines."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    defined: dict[str, Any] = {}
    exec(code[1], defined)
    return defined


def by_plan(fraction: float) -> Change:
    def change(both: Networks, situation: str, folder: Path) -> Networks:
        page = of_page()
        for number in (1,) if situation in OF_D else (0, 1):
            own, (real, z) = networks(), data()[0]

            def step(own: Networks = own, real: Tensor = real, z: Tensor = z) -> None:
                for each in own:
                    each.zero_grad()
                SITUATIONS[situation](*own, real, z)

            file = folder / f"plan_{number}.json"
            held = (*own[1 - number].parameters(), real, z)
            page["write_plan"](own[number], step, held, file, fraction)
            page["with_plan"](both[number], file)
        return both

    return change


VARIANTS: dict[str, Change] = {
    "`full`": by(lambda: ac_variants["full"](**BLOCKS)),
    "`full ac.use_reentrant=true`": by(lambda: ac_variants["full"](use_reentrant=True, **BLOCKS)),
    "`selective_layer`": by(lambda: ac_variants["selective_layer"](**BLOCKS)),
    "`selective_op`": by(lambda: ac_variants["selective_op"](**BLOCKS)),
    "`modules ac.discard=[norm]`": by(lambda: ac_variants["modules"](discard=["norm"], **BLOCKS)),
    "`nested`": by(lambda: ac_variants["nested"](**BLOCKS)),
    "`offload`": by(lambda: ac_variants["offload"](**BLOCKS)),
    "`budget`, planned at its first call": by(lambda: ac_variants["budget"](fraction=0.8, **BLOCKS)),
    "`budget`, with the plan of this step": by_plan(0.9),
    "the file of `full`": by_file(ac_variants["full"](**BLOCKS)),
    "the file of `selective_op`": by_file(ac_variants["selective_op"](**BLOCKS)),
    "the file of `offload`": by_file(ac_variants["offload"](**BLOCKS)),
    "the file of `budget`": by_file(ac_variants["budget"](fraction=0.8, **BLOCKS)),
}


def cells() -> Mapping[tuple[str, str], str]:
    """Return the cells of the page by variant and situation."""
    table = PAGE.split("<!-- cells -->")[1].split("<!-- /cells -->")[0].strip().splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    names = [each.strip("`") for each in head[1:]]
    return {(row[0], name): cell for row in rows for name, cell in zip(names, row[1:], strict=True)}


def note(cell: str) -> str:
    """Return the words that a refusal quotes."""
    found = re.search(rf"^{cell.removeprefix('refused (').rstrip(')')}\. `(.+?)`", PAGE, re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_page_has_a_cell_for_each_variant_and_situation() -> None:
    assert list(cells()) == [(variant, situation) for variant in VARIANTS for situation in SITUATIONS]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_cell(variant: str, situation: str, tmp_path: Path) -> None:
    cell = cells()[variant, situation]
    if cell == "equal":
        assert are_equal(plain(situation), trained(situation, VARIANTS[variant], tmp_path))
        return
    with pytest.raises((StrategyError, RuntimeError)) as refused:
        trained(situation, VARIANTS[variant], tmp_path)
    assert note(cell) in " ".join(str(refused.value).replace("`", "").split())


@pytest.mark.parametrize("situation", ["retain_graph", "gradient penalty"])
def test_the_fraction_that_a_refusal_names_trains(situation: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError) as refused:
        trained(situation, by_plan(0.9), tmp_path)
    named = re.search(r"ac\.fraction=([\d.]+)", str(refused.value))
    assert named is not None
    found = trained(situation, by_plan(float(named[1])), tmp_path)
    assert are_equal(plain(situation), found)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
KEEP_STATE: dict[str, tuple[Change, bool]] = {
    "full": (VARIANTS["`full`"], False),
    "full with rewind": (by(lambda: ac_variants["full"](rewind=True, **BLOCKS)), True),
    "nested": (VARIANTS["`nested`"], True),
    "offload": (VARIANTS["`offload`"], True),
    "modules": (VARIANTS["`modules ac.discard=[norm]`"], True),
    "budget": (VARIANTS["`budget`, planned at its first call"], True),
    "the file of full": (VARIANTS["the file of `full`"], False),
}


@pytest.mark.parametrize(("change", "keeps_state"), KEEP_STATE.values(), ids=KEEP_STATE)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_state_in_forward(
    norm: Callable[[], nn.Module], change: Change, *, keeps_state: bool, tmp_path: Path
) -> None:
    expected, found = (trained("one by one", each, tmp_path, norm) for each in (None, change))
    assert are_equal(expected, found) == keeps_state
