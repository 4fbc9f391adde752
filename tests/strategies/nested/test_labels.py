"""Labels at any depth: which forward holds a region, and what is refused."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies import StrategyError
from strategies.ac.nested import Nested
from tests.strategies.nested.examination import Calls, different, rows, step

WIDTH = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed: Tensor = self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2))
        return mixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.dropout(self.attention(self.norm(x)), 0.3)
        return x + self.down(functional.gelu(self.up(x))) * 2  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.twice = Block()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x) + 0.1
        return self.head(self.twice(self.twice(x)))  # type: ignore[no-any-return]


def plain_model() -> Model:
    torch.manual_seed(0)
    return Model()


# labels, modules that a region enters half, and calls of all linears below, where not 1
LAID_OUT: dict[str, tuple[dict[str, Any], list[str], dict[str, int]]] = {
    "blocks": ({"layers.0": 0, "layers.1": 0}, [], {"layers.0": 2, "layers.1": 2}),
    "inside one block": (
        {"layers.0.up": 0, "layers.0.down": [0, 0]},
        [],
        {"layers.0.up": 2, "layers.0.down": 3},
    ),
    "inside two blocks": (
        {"layers.0.up": 0, "layers.1.up": 1},
        [],
        {"layers.0.up": 2, "layers.1.up": 2},
    ),
    "deep inside": ({"layers.0.attention.out": 3}, [], {"layers.0.attention.out": 2}),
    "a block, and inside it": (
        {"layers.0": 0, "layers.0.attention": [0, 0], "layers.0.attention.out": [0, 0, 0]},
        [],
        {"layers.0": 2, "layers.0.attention": 3, "layers.0.attention.out": 4},
    ),
    "blocks, and inside one of them": (
        {"layers.0": 0, "layers.1": 0, "layers.1.up": [0, 2], "layers.2": 1},
        [],
        {"layers.0": 2, "layers.1": 2, "layers.1.up": 3, "layers.2": 2},
    ),
    "from inside a block into the next": (
        {"layers.0.up": 0, "layers.0.down": 0, "layers.1": 0},
        ["layers.0"],
        {"layers.0.up": 2, "layers.0.down": 2, "layers.1": 2},
    ),
    "from inside a block to inside another": (
        {"layers.0.down": [0, 0], "layers.1": 0, "layers.2.norm": [0, 1], "layers.2.attention.qkv": [0, 1]},
        ["layers.0", "layers.2", "layers.2.attention"],
        {"layers.0.down": 3, "layers.1": 2, "layers.2.attention.qkv": 3},
    ),
    "an inner region in a block that is looked into": (
        {"layers.0.up": [1, 0], "layers.0.down": 1, "layers.1": 1, "layers.1.down": [1, 4]},
        ["layers.0"],
        {"layers.0.up": 3, "layers.0.down": 2, "layers.1": 2, "layers.1.down": 3},
    ),
    "a module called twice": ({"twice": 0}, [], {"twice": 4}),
}


@pytest.mark.parametrize(("labels", "crossed", "calls"), LAID_OUT.values(), ids=LAID_OUT)
def test_regions_stand_where_their_calls_are_made(
    labels: dict[str, Any], crossed: list[str], calls: dict[str, int]
) -> None:
    plain = plain_model()
    model = Nested(labels=labels, early_stop=False).apply(copy.deepcopy(plain))
    counted = Calls(model, nn.Linear)
    for _ in range(2):
        counted.counts.clear()
        x = torch.randn(3, WIDTH)
        expected = step(plain, x.clone().requires_grad_())
        assert different(expected, step(model, x.clone().requires_grad_())) == []
    nested, units = Nested(labels=labels), [fqn for fqn, _ in plain.named_modules() if fqn]
    assert {unit: refusal for unit in units if (refusal := _refusal(nested, model, unit))} == {
        unit: f"ac.labels: a region begins inside {unit!r}, an FSDP unit, and ends outside of it, "
        f"or the other way round; end it with {unit!r}"
        for unit in crossed
    }
    below = {"": 1, "twice": 2} | calls
    assert dict(counted.counts) == {
        fqn: below[max((each for each in below if f"{fqn}.".startswith(f"{each}." if each else "")), key=len)]
        for fqn in counted.counts
    }


def _refusal(nested: Nested, model: nn.Module, unit: str) -> str | None:
    try:
        nested.check_units(model, [unit])
    except StrategyError as error:
        return str(error)
    return None


BETWEEN = "put what is between into the region, or give the second part another index"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "inside a module called twice": (
        {"twice.up": 0},
        (
            "region 0 ends at 'twice.up' and begins again at 'twice.up'; 'twice.down', 'twice.norm', "
            f"'twice.attention' stand between: {BETWEEN}"
        ),
    ),
    "all of a module called twice": (
        {f"twice.{name}": 0 for name in ("norm", "attention", "up", "down")} | {"twice.down": [0, 0]},
        (
            "region 0_0 ends at 'twice.down' and begins again at 'twice.down'; 'twice.norm', "
            f"'twice.attention', 'twice.up' stand between: {BETWEEN}"
        ),
    ),
    "a container": ({"layers": 0}, "'layers' is a list of modules, which nobody calls; label what it holds"),
    "a function between two blocks' calls": (
        {"layers.0.attention": 0, "layers.0.down": 0},
        (
            "region 0 ends at 'layers.0.attention' and begins again at 'layers.0.down'; "
            f"'layers.0.up' stands between: {BETWEEN}"
        ),
    ),
    "another path inside": (
        {"layers.0": 0, "layers.0.up": [1, 0]},
        (
            "'layers.0.up' has the path [1, 0], and 'layers.0', which holds it, [0]; "
            "the inner path must begin with the outer one"
        ),
    ),
    "a shorter path inside": (
        {"layers.0": [0, 1], "layers.0.up": 0},
        (
            "'layers.0.up' has the path [0], and 'layers.0', which holds it, [0, 1]; "
            "the inner path must begin with the outer one"
        ),
    ),
    "no path inside": (
        {"layers.0": 0, "layers.0.up": None},
        (
            "'layers.0.up' has the path [], and 'layers.0', which holds it, [0]; "
            "the inner path must begin with the outer one"
        ),
    ),
    "a crossing": (
        {"layers.0": [0, 0], "layers.1": [0, 1], "layers.2": [0, 0]},
        "region 0_0 ends at 'layers.0' and begins again at 'layers.2'; 'layers.1' stands between: " + BETWEEN,
    ),
}


@pytest.mark.parametrize(("labels", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(labels: dict[str, Any], message: str) -> None:
    model = plain_model()
    with pytest.raises(StrategyError) as error:
        step(Nested(labels=labels).apply(model), rows())
    assert str(error.value) == f"ac.labels: {message}"


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, is_first: bool) -> Tensor:
        x = self.always(x)
        return self.first(x) if is_first else x  # type: ignore[no-any-return]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Sometimes()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x, is_first=True), is_first=False)  # type: ignore[no-any-return]


def test_a_label_inside_one_of_two_calls_is_a_region_of_that_call() -> None:
    torch.manual_seed(0)
    plain = Both()
    model = Nested(labels={"inner.first": 0}, early_stop=False).apply(copy.deepcopy(plain))
    counted = Calls(model, nn.Linear)
    x = torch.randn(3, WIDTH)
    assert different(step(plain, x), step(model, x)) == []
    assert dict(counted.counts) == {"inner.always": 2, "inner.first": 2}


def test_a_region_around_both_calls_is_one() -> None:
    torch.manual_seed(0)
    plain = Both()
    model = Nested(labels={"inner.always": 0, "inner.first": 0}, early_stop=False).apply(copy.deepcopy(plain))
    counted = Calls(model, nn.Linear)
    x = torch.randn(3, WIDTH)
    assert different(step(plain, x), step(model, x)) == []
    assert dict(counted.counts) == {"inner.always": 4, "inner.first": 2}


class Shared(nn.Module):
    """One linear under two names, with another between its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


def test_each_name_of_a_shared_module_is_one_call() -> None:
    torch.manual_seed(0)
    plain = Shared()
    model = copy.deepcopy(plain)
    Nested(labels={"first": 0, "second": [1, 0]}, early_stop=False).apply(model)
    counted = Calls(model, nn.Linear)
    x = torch.randn(3, WIDTH)
    assert different(step(plain, x), step(model, x)) == []
    assert dict(counted.counts) == {"first": 2 + 3, "between": 1}


def test_one_name_of_a_shared_module_stands_for_all_calls() -> None:
    with pytest.raises(StrategyError) as error:
        step(Nested(labels={"second": 0}).apply(Shared()), rows())
    assert str(error.value) == (
        "ac.labels: region 0 ends at 'first' and begins again at 'first'; 'between' stands between: "
        + BETWEEN
    )


def test_more_names_than_calls_are_refused() -> None:
    model = Shared()
    model.third = model.first
    with pytest.raises(StrategyError) as error:
        step(Nested(labels={"first": 0, "second": 1, "third": 2}).apply(model), rows())
    assert str(error.value) == (
        "ac.labels: 'first' has 3 names with different labels, and 2 calls; give all its names one label"
    )


CROSSING = {"layers.0.down": 0, "layers.1": 0}


def test_hooks_of_a_module_that_is_looked_into_are_refused() -> None:
    message = (
        "ac.labels: a region begins inside 'layers.0', a module with hooks, and ends outside of it, "
        "or the other way round; end it with 'layers.0'"
    )
    model = plain_model()
    Nested(labels=CROSSING).apply(model)
    step(model, rows())
    handle = model.layers[0].register_forward_pre_hook(lambda *_: None)
    with pytest.raises(StrategyError) as error:
        step(model, rows())
    assert str(error.value) == message
    handle.remove()
    step(model, rows())


@pytest.mark.parametrize(
    "labels", [CROSSING, {"layers.0": 0, "layers.0.up": [0, 0]}], ids=["looked into", "nested"]
)
def test_hooks_of_every_other_module_fire(labels: dict[str, Any]) -> None:
    fired: list[str] = []
    model = plain_model()
    Nested(labels=labels, early_stop=False).apply(model)
    named = {fqn: module for fqn, module in model.named_modules() if fqn not in {"layers.0", "layers"}}
    for fqn, module in named.items():
        module.register_forward_hook(lambda *_, fqn=fqn: fired.append(fqn))
    with torch.no_grad():
        model(rows())
    expected = list(fired)
    fired.clear()
    model(rows())
    assert fired == expected


@pytest.mark.parametrize("label", ["layers.0", "layers.0.up"], ids=["of the block", "inside the block"])
def test_a_forward_set_on_the_instance_of_a_block_is_followed(label: str) -> None:
    model = plain_model()
    block: Any = model.layers[0]
    block.forward = types.MethodType(lambda self, x: Block.forward(self, x) * 2, block)
    expected = step(model, torch.ones(3, WIDTH))
    Nested(labels={label: 0}).apply(model)
    assert different(expected, step(model, torch.ones(3, WIDTH))) == []


def test_a_model_with_a_forward_of_its_own_is_refused() -> None:
    model: Any = plain_model()
    model.forward = lambda x: x
    with pytest.raises(StrategyError) as error:
        Nested(labels={"layers.0": 0}).apply(model)
    assert str(error.value) == (
        "ac: 'Model' has a forward set on the instance, which no region can hold; "
        "make it a method of the module's class, or of a module that holds this one"
    )
