"""modules: patterns of modules and operators, their fates in bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from harness.records.verdict import idle_because
from strategies import Observation, StrategyError
from strategies.ac.modules import Modules
from strategies.regions.region import regions
from tests.parity.cases import MODELS
from tests.strategies.meters import Measured, measure
from tests.strategies.toys import WIDTH, Block, Stack, differences, toy, train_step

TOKENS = 8
COLUMN = 4 * TOKENS  # bytes of one fp32 column
D = WIDTH * COLUMN
NORM = 2 * COLUMN  # mean and deviation
UP = 2 * TOKENS * WIDTH * 4 * WIDTH  # FLOPs


def applied(**fields: Any) -> Any:
    return Modules(layers_fqn="layers", **fields).apply(toy())


def cost(**fields: Any) -> Measured:
    torch.manual_seed(0)
    model = Stack(Block(bias=False, dropout=0.0))
    if fields:
        Modules(layers_fqn="layers", **fields).apply(model)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    model(x)
    return measure(model, x)


# freed and moved bytes, and FLOPs of what runs again, of the bias-free block without dropout
FATES: dict[str, tuple[dict[str, Any], tuple[int, int, int | None]]] = {
    "a norm whose result another module saves": ({"recompute": ["norm"]}, (NORM, 0, 0)),
    "its result too": ({"discard": ["norm"]}, (NORM + D, 0, 0)),
    "an activation by its operator": ({"discard": ["::aten.gelu*"]}, (4 * D, 0, 0)),
    "a product that an activation reads": ({"discard": ["up"]}, (4 * D, 0, UP)),
    "both in host memory": ({"offload": ["up", "::aten.gelu*"]}, (8 * D, 8 * D, 0)),
    "one product kept, of all": ({"keep": ["up"]}, (10 * D + 2 * COLUMN + NORM, 0, None)),
}


@pytest.mark.parametrize(("fields", "expected"), FATES.values(), ids=FATES)
def test_bytes_and_flops(fields: dict[str, Any], expected: tuple[int, int, int | None]) -> None:
    plain, found = cost(), cost(**fields)
    freed, moved, again = expected
    assert (plain.saved_bytes - found.saved_bytes, found.host_bytes) == (freed, moved)
    assert again is None or found.backward_flops - plain.backward_flops == again


@pytest.mark.parametrize("fields", [fields for fields, _ in FATES.values()], ids=FATES)
def test_parity_bit_for_bit_in_two_steps(fields: dict[str, Any]) -> None:
    plain, model = toy(), applied(**fields)
    for _ in range(2):
        assert differences(train_step(plain), train_step(model)) == []


class EverySecond(Modules):
    """Names decide in every second block."""

    def _chosen(self, fqns: Sequence[str]) -> Sequence[str]:
        return fqns[1::2]


def test_names_decide_in_the_chosen_blocks_alone() -> None:
    model = EverySecond(layers_fqn="layers", discard=("norm",)).apply(toy())
    assert list(regions(model)) == ["layers.1", "layers.1.norm"]


def test_of_modules_inside_one_another_the_inner_one_counts() -> None:
    saved = []
    rows: list[dict[str, Any]] = [
        {},
        {"discard": ["feed_forward"]},
        {"discard": ["feed_forward"], "keep": ["*.up"]},
    ]
    for fields in rows:
        torch.manual_seed(0)
        model = MODELS["llama"].build()
        if fields:
            Modules(layers_fqn="layers", **fields).apply(model)
        saved.append(measure(model, torch.arange(64).view(4, 16)).saved_bytes)
    hidden = 64 * 64 * 4  # bytes of what a linear of two blocks makes
    assert (saved[0] - saved[1], saved[0] - saved[2]) == (2 * 4 * hidden, 2 * 3 * hidden)


def test_an_operator_that_never_runs_is_told_and_so_are_moved_bytes() -> None:
    strategy = Modules(layers_fqn="layers", discard=("::aten.gelu*", "up::aten.silu*"), offload=("norm",))
    model = strategy.apply(toy())
    train_step(model)
    moved = 3 * 2 * (NORM + D)  # three blocks, 16 tokens
    assert strategy.observe(model) == Observation(
        named=("norm", "aten.gelu*", "aten.silu*"), never_fired=("aten.silu*",), offloaded_bytes=moved
    )


def test_modules_that_free_bytes_are_not_idle_where_an_operator_never_runs() -> None:
    model = applied(discard=["norm", "::aten.silu*"])
    train_step(model)
    seen = Modules(discard=("norm",)).observe(model)
    assert seen.never_fired == ("aten.silu*",)
    assert (
        idle_because(named=seen.named, never_fired=seen.never_fired, has_acted=True, freed_nothing=None)
        is None
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(
            Modules,
            "ac: modules names no module; give one of ac.keep, ac.recompute, ac.discard, ac.offload, such as "
            "ac.discard=['*norm']",
            id="nothing",
        ),
        pytest.param(
            lambda: Modules(keep="up"),  # type: ignore[arg-type]
            "ac.keep: must be a list of patterns of module names, got 'up'",
            id="a name for a list",
        ),
        pytest.param(
            lambda: applied(offload=["upp"]),
            "ac.offload: 'upp' matches no module inside a block; the nearest: 'up', 'out'",
            id="no such module",
        ),
        pytest.param(
            lambda: applied(keep=["up"], discard=["u*"]),
            "ac.discard: names 'up', and so does ac.keep; name it in one of them",
            id="two fates of a module",
        ),
        pytest.param(
            lambda: applied(keep=["up::aten.mm*"], offload=["*p::aten.mm*"]),
            "ac.offload: names 'aten.mm*' in 'up', and so does ac.keep; name it in one of them",
            id="two fates of an operator",
        ),
        pytest.param(
            lambda: Modules(keep=("up",)).call_site(toy()),
            "wrap_order: call_site makes the model one region, and ac=modules names modules inside blocks; "
            "use inside_fsdp",
            id="no blocks",
        ),
        pytest.param(
            lambda: Modules(keep=("up",)).check_compilation("ac_first", "blocks"),
            "compile: ac=modules follows the operators of eager blocks; use compile=none, or ac=selective_op",
            id="compiled blocks",
        ),
    ],
)
def test_refusals(act: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        act()
    assert str(error.value) == message
