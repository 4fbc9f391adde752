"""selective_op: what is kept, what never fires, and random operators that are not run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import StrategyError
from strategies.ac.full import Full
from strategies.ac.selective_op import SelectiveOp
from strategies.regions.presets import PRESETS
from tests.strategies.meters import measure
from tests.strategies.toys import BATCH, SEQUENCE, WIDTH, Stack, differences, toy, train_step

MODALITIES = PRESETS["modalities"].operators

NEVER_FIRED: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "no convolution where nobody named one": ("no_dropout", ["matmul", "conv", "attention"], ()),
    "no convolution where somebody named it": ("no_dropout", ["matmul", "conv"], ("conv",)),
    "everything fires": ("no_dropout", ["matmul", "attention"], ()),
    "attention with dropout runs as bmm on CPU": ("biased", ["matmul", "attention"], ("attention",)),
    "mm in a biased model": ("biased", ["aten.mm.default", "matmul"], ("aten.mm.default",)),
    "addmm in a bias-free model": ("bias_free", ["aten.addmm.default"], ("aten.addmm.default",)),
    "modalities' list on a biased model": ("biased", "modalities", MODALITIES),
    "modalities' list on a bias-free model": ("bias_free", "modalities", MODALITIES[1:]),
    "no collectives on one rank": ("biased", ["comm", "max", "topk"], ("comm", "max", "topk")),
}


@pytest.mark.parametrize(("model_name", "save_ops", "expected"), NEVER_FIRED.values(), ids=NEVER_FIRED)
def test_never_fired(model_name: str, save_ops: Any, expected: tuple[str, ...]) -> None:
    strategy = SelectiveOp(layers_fqn="layers", save_ops=save_ops)
    model = strategy.apply(toy(model_name))
    train_step(model)
    observation = strategy.observe(model)
    assert observation.named == (MODALITIES if save_ops == "modalities" else tuple(save_ops))
    assert observation.never_fired == expected


def test_convolutions_are_kept() -> None:
    measured = []
    for save_ops in (["matmul", "attention"], ["matmul", "conv", "attention"]):
        model = Stack(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 3, padding=1)))
        strategy = SelectiveOp(layers_fqn="layers", save_ops=save_ops)
        strategy.apply(model)
        x = torch.randn(2, 4, 8, requires_grad=True)
        counter = Operators("aten.convolution.default")
        outputs = model.block(x)
        with counter:
            outputs.sum().backward()
        measured.append((counter.count, strategy.observe(model).never_fired))
    assert measured == [(1, ("matmul", "attention")), (0, ("matmul", "attention"))]


class RandomOperators(nn.Module):
    """Two dropouts, the first as the one operator that CUDA has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = torch.ops.aten.native_dropout.default(self.first(x), 0.5, True)[0]
        return nn.functional.dropout(self.second(dropped).relu(), 0.5).sin()


def test_dropout_after_a_saved_random_operator_draws_what_forward_drew() -> None:
    gradients = []
    for is_enclosed in (False, True):
        torch.manual_seed(0)
        model = Stack(RandomOperators())
        if is_enclosed:
            SelectiveOp(layers_fqn="layers", save_ops=["aten.native_dropout.default"]).apply(model)
        x = torch.ones(4, 32, requires_grad=True)
        model.block(x).sum().backward()
        gradients.append((x.grad, torch.get_rng_state(), *(p.grad for p in model.parameters())))
    for expected, actual in zip(*gradients, strict=True):
        assert expected is not None
        assert torch.equal(expected, actual)


def test_hooks_of_offloaded_inputs_get_nothing_of_what_is_saved() -> None:
    # warnings are errors here, and some releases warn of a release in which hooks will get it
    model = Stack(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()))
    strategy = SelectiveOp(layers_fqn="layers", offload=True)
    strategy.apply(model)
    x = torch.randn(4, 8, requires_grad=True)
    model.block(x * 1.0).sum().backward()
    assert strategy.observe(model).offloaded_bytes == 4 * 8 * 4  # the input, without the product


def test_counting_matmuls_starts_anew_in_every_call() -> None:
    # three products a call: a counter that went on would recompute another one in the second call
    model = Stack(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))))
    SelectiveOp(layers_fqn="layers", matmul_recompute_every=2, early_stop=False).apply(model)
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        counter = Operators("aten.mm.default")
        outputs = model.block(x)
        with counter:
            outputs.sum().backward()
        assert counter.count == 1 + 6


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) == self.name
        return func(*args, **(kwargs or {}))


def test_operators_may_be_given_as_objects() -> None:
    assert SelectiveOp(save_ops=[torch.ops.aten.mm.default]) == SelectiveOp(save_ops=("aten.mm.default",))


def test_reentrant_is_refused() -> None:
    with pytest.raises(StrategyError) as error:
        SelectiveOp(use_reentrant=True)
    assert str(error.value) == (
        "ac.use_reentrant: must be false: reentrant recomputation cannot save single operators"
    )


def test_a_bad_list_is_refused_before_there_is_a_model() -> None:
    with pytest.raises(StrategyError, match=r"'aten\.mm' is an operator packet"):
        SelectiveOp(save_ops=["aten.mm"])


def test_parity_of_a_model_that_is_evaluated_between_steps() -> None:
    plain, model = toy(), toy()
    SelectiveOp(layers_fqn="layers").apply(model)
    for _ in range(2):
        assert differences(train_step(plain), train_step(model)) == []
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.int64))


_UP_FLOPS = 3 * 2 * BATCH * SEQUENCE * WIDTH * 4 * WIDTH  # of three blocks
_UP_BYTES = 3 * BATCH * SEQUENCE * 4 * WIDTH * 4
TOKENS = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 11


@pytest.mark.parametrize("keep", [("up",), ("*.up",), ("u*", "norm")], ids=["a name", "a path", "patterns"])
def test_products_of_named_modules_alone_are_kept(keep: tuple[str, ...]) -> None:
    model = SelectiveOp(layers_fqn="layers", keep=keep).apply(toy("no_dropout"))
    assert differences(train_step(toy("no_dropout")), train_step(model)) == []  # type: ignore[arg-type]
    full = measure(Full(layers_fqn="layers").apply(toy("no_dropout")), TOKENS)
    named = measure(model, TOKENS)
    assert full.backward_flops - named.backward_flops == _UP_FLOPS
    assert named.saved_bytes - full.saved_bytes == _UP_BYTES


def test_all_modules_are_as_good_as_none() -> None:
    costs = [
        measure(SelectiveOp(layers_fqn="layers", save_ops=("matmul",), keep=keep).apply(toy()), TOKENS)
        for keep in (("*",), ("qkv", "out", "up", "down"))
    ]
    assert costs[0] == costs[1]


def test_a_module_that_multiplies_nothing_fires_nothing() -> None:
    strategy = SelectiveOp(layers_fqn="layers", save_ops=("matmul",), keep=("norm",))
    model = strategy.apply(toy())
    train_step(model)
    assert strategy.observe(model).never_fired == ("matmul",)


@pytest.mark.parametrize(
    ("keep", "act", "message"),
    [
        pytest.param(
            ("*.upp",),
            lambda strategy: strategy.apply(toy()),
            "ac.keep: '*.upp' matches no module inside a block; the nearest: 'up', 'out'",
            id="a typo",
        ),
        pytest.param(
            "up",
            lambda _strategy: None,
            "ac.keep: must be a list of patterns of module names, got 'up'",
            id="a name for a list",
        ),
        pytest.param(
            ("up",),
            lambda strategy: strategy.call_site(toy()),
            "wrap_order: call_site makes the model one region, and ac.keep names modules inside blocks; "
            "use inside_fsdp",
            id="no blocks",
        ),
        pytest.param(
            ("up",),
            lambda strategy: strategy.check_compilation("ac_first", "blocks"),
            "ac.keep: names modules whose calls compiled code hides; use compile=none",
            id="compiled code",
        ),
        pytest.param(
            ("up",),
            lambda strategy: strategy.view("file", toy(), ()),
            "ac.keep: is ['up'], which a written file has no words for; leave it out",
            id="a written file",
        ),
    ],
)
def test_what_names_no_modules_is_refused(keep: Any, act: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        act(SelectiveOp(layers_fqn="layers", keep=keep))
    assert str(error.value) == message
