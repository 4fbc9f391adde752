"""The laws of AC variants, all variants at once: a new variant is examined by being there."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from strategies import Strategy, StrategyError, ac_variants, eager_variants
from strategies.regions.region import regions
from tests.strategies.meters import measure
from tests.strategies.toys import HEADS, MODELS, WIDTH, Block, Stack, Toy, differences, toy, train_step

APPLIED = list(eager_variants)
ENABLED = [name for name in APPLIED if name != "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A variant with some of its fields away from the default."""

    variant: str
    changes: dict[str, Any]

    def make(self, **more: Any) -> Strategy:
        given = {"layers_fqn": "layers"} | self.changes | more
        cls = ac_variants[self.variant]
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})


SETTINGS = {name: Setting(variant=name, changes={}) for name in APPLIED} | {
    "budget": Setting(variant="budget", changes={"fraction": 0.91}),
    "budget_by_class": Setting(variant="budget", changes={"fraction": 0.95, "module_classes": ("Block",)}),
    "full_to_the_end": Setting(variant="full", changes={"early_stop": False}),
    "full_reentrant": Setting(variant="full", changes={"use_reentrant": True}),
    "full_by_class": Setting(variant="full", changes={"module_classes": ("Block",)}),
    "every_third_block": Setting(variant="selective_layer", changes={"ac_freq": 3}),
    "selective_layer_reentrant": Setting(variant="selective_layer", changes={"use_reentrant": True}),
    "torchtitan_preset": Setting(variant="selective_op", changes={"save_ops": "torchtitan"}),
    "modalities_preset": Setting(variant="selective_op", changes={"save_ops": "modalities"}),
    "every_second_matmul": Setting(variant="selective_op", changes={"matmul_recompute_every": 2}),
    "selective_op_to_the_end": Setting(variant="selective_op", changes={"early_stop": False}),
    "offload_by_class": Setting(variant="offload", changes={"module_classes": ("Block",)}),
    "one_region_of_all": Setting(variant="nested", changes={"levels": [1]}),
    "each_block_in_two_regions": Setting(variant="nested", changes={"levels": [1, 1]}),
    "nested_to_the_end": Setting(variant="nested", changes={"levels": [1, 1], "early_stop": False}),
}
if "torch_remat" in eager_variants:
    SETTINGS["torch_remat_keeps_modules"] = Setting(
        variant="torch_remat", changes={"save_regions": ("norm", "up")}
    )

each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
each_enabled_variant = pytest.mark.parametrize("setting", [SETTINGS[n] for n in ENABLED], ids=ENABLED)


@each_setting
@pytest.mark.parametrize("model_name", MODELS)
def test_parity_bit_for_bit_in_two_steps(setting: Setting, model_name: str) -> None:
    plain, model = toy(model_name), toy(model_name)
    model = setting.make().apply(model)  # type: ignore[assignment]
    for _ in range(2):
        assert differences(train_step(plain), train_step(model)) == []


class ByName(nn.Module):
    """A model whose input has no position."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, *, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@each_enabled_variant
def test_parity_of_a_model_that_takes_its_input_by_name_alone(setting: Setting) -> None:
    found: list[list[Tensor]] = []
    for strategy in (ac_variants["none"](), setting.make(fraction=1.0)):
        torch.manual_seed(0)
        model = strategy.apply(ByName())
        model(x=torch.randn(4, WIDTH)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) == 4
    assert all(map(torch.equal, *found))


called_alone = pytest.mark.filterwarnings("ignore:ac=budget. before the first block")


AT_CALL_SITES = {  # these refuse them, because they choose among submodules
    name: setting
    for name, setting in SETTINGS.items()
    if setting.variant not in {"selective_layer", "nested", "budget"}
    and "save_regions" not in setting.changes
}


@pytest.mark.parametrize("setting", AT_CALL_SITES.values(), ids=AT_CALL_SITES)
def test_parity_through_a_call_site(setting: Setting) -> None:
    plain, model = toy(), toy()
    call = setting.make().call_site(model)
    for _ in range(2):
        assert differences(train_step(plain), train_step(model, call)) == []
    assert type(model) is Toy


@each_setting
def test_names_are_those_of_the_plain_model(setting: Setting) -> None:
    plain, model = toy(), setting.make().apply(toy())
    for listing in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(model, listing)()] == [n for n, _ in getattr(plain, listing)()]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())


@called_alone
@each_setting
def test_independence_of_the_models_in_one_process(setting: Setting) -> None:
    alone = setting.make().apply(toy())
    expected = measure_layers(alone)
    for name in ENABLED:
        SETTINGS[name].make().apply(toy())
    assert measure_layers(setting.make().apply(toy())) == expected
    assert measure_layers(alone) == expected


def measure_layers(model: nn.Module) -> list[Any]:
    """Return what `model` and each of its blocks cost, under one seed."""
    train_step(model)
    model.zero_grad()  # with gradients that stand, ac=budget would plan anew, within the measured forward
    torch.manual_seed(1)
    whole = measure(model, torch.arange(8).view(2, 4))
    return [
        whole,
        *(measure(block, torch.randn(2, 4, WIDTH, requires_grad=True)) for block in model.layers),  # type: ignore[union-attr]
    ]


@pytest.mark.parametrize("second", ENABLED)
@each_enabled_variant
def test_a_second_application_is_refused(setting: Setting, second: str) -> None:
    model = setting.make(ac_freq=1).apply(toy())
    again = SETTINGS[second].make(ac_freq=1)
    with pytest.raises(StrategyError) as error:
        again.apply(model)
    where = next(iter(regions(model)), "layers.0") or "Toy"  # a wrapper of torch is no region
    assert str(error.value) == f"ac: {where!r} is already checkpointed; apply one variant to a model"


EVERY_FIELD = [(name, field.name) for name in ENABLED for field in fields(ac_variants[name])]


@pytest.mark.parametrize(("variant", "field"), EVERY_FIELD, ids=[".".join(pair) for pair in EVERY_FIELD])
def test_refusal_of_a_value_of_another_type(variant: str, field: str) -> None:
    wrong: Any = "a" if field in {"budget_gib", "host_gib"} else 2.5
    with pytest.raises(StrategyError) as error:
        ac_variants[variant](**{field: wrong})
    assert str(error.value).startswith(f"ac.{field}: must be ")
    assert str(error.value).endswith(f", got {wrong!r}")


REFUSED_VALUES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a number for a name": ("full", {"layers_fqn": 3}, "ac.layers_fqn: must be str, got 3"),
    "a word for a switch": ("full", {"early_stop": "yes"}, "ac.early_stop: must be bool, got 'yes'"),
    "nothing for a name": ("offload", {"layers_fqn": None}, "ac.layers_fqn: must be str, got None"),
    "a word for a number": ("selective_layer", {"ac_freq": "a"}, "ac.ac_freq: must be int, got 'a'"),
    "half a block": ("selective_layer", {"ac_freq": 2.5}, "ac.ac_freq: must be int, got 2.5"),
    "a switch for a number": ("selective_layer", {"ac_freq": True}, "ac.ac_freq: must be int, got True"),
    "a word for an optional number": (
        "selective_op",
        {"matmul_recompute_every": "2"},
        "ac.matmul_recompute_every: must be int or None, got '2'",
    ),
    "a bare class name": (
        "full",
        {"module_classes": "Block"},
        "ac.module_classes: must be a list of class names, got 'Block'",
    ),
    "a number for a class name": (
        "full",
        {"module_classes": (3,)},
        "ac.module_classes: must be a list of class names, got (3,)",
    ),
}


@pytest.mark.parametrize(("variant", "changes", "message"), REFUSED_VALUES.values(), ids=REFUSED_VALUES)
def test_refusal_says_what_would_be_right(variant: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        ac_variants[variant](**changes)
    assert str(error.value) == message


@each_setting
def test_restraint_no_state_of_torch_is_changed(setting: Setting) -> None:
    before = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _get_current_dispatch_mode_stack(),
        dict(vars(Block)),
        dict(vars(nn.Module)),
    )
    model = toy()
    state = torch.get_rng_state()
    strategy = setting.make()
    strategy.apply(model)
    assert torch.equal(torch.get_rng_state(), state)
    train_step(model)
    strategy.observe(model)
    after = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _get_current_dispatch_mode_stack(),
        dict(vars(Block)),
        dict(vars(nn.Module)),
    )
    assert before == after


@each_setting
def test_evaluation_without_gradients_calls_through(setting: Setting) -> None:
    plain, model = toy().eval(), setting.make().apply(toy()).eval()
    tokens = torch.arange(8).view(2, 4)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
    with torch.inference_mode():
        assert torch.equal(model(tokens), plain(tokens))


@called_alone
@each_setting
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_model_carries_the_strategy(setting: Setting, duplicate: Any) -> None:
    strategy = setting.make()
    model = strategy.apply(toy())
    twin = duplicate(model)
    assert differences(train_step(model), train_step(twin)) == []
    assert strategy.observe(twin) == strategy.observe(model)
    assert measure_layers(twin) == measure_layers(model)


@each_setting
def test_a_copy_of_a_subclass_of_what_was_applied_carries_the_strategy(setting: Setting) -> None:
    model = setting.make().apply(toy())
    for block in model.get_submodule("layers").children():
        block.__class__ = type("Block", (type(block),), {})  # as adapters do
    assert differences(train_step(model), train_step(copy.deepcopy(model))) == []


@each_setting
def test_apply_works_on_the_meta_device(setting: Setting) -> None:
    with torch.device("meta"):
        model = setting.make().apply(toy())
    assert {p.device.type for p in model.parameters()} == {"meta"}


TOKENS = 8
COLUMN = 4 * TOKENS  # bytes of one fp32 column
D, LSE = WIDTH * COLUMN, HEADS * COLUMN
SCALE = 4 * WIDTH
QKV, OUT, UP, DOWN = (
    2 * TOKENS * WIDTH * width for width in (3 * WIDTH, WIDTH, 4 * WIDTH, 4 * WIDTH)
)  # FLOPs

# saved bytes and recomputed FLOPs of the bias-free block without dropout, its input D left out; early stop
# leaves out the last product, because its input is the last tensor that backward needs
HONESTY = {
    # mean and deviation of the norm, its output D, q k v 3D, attention D + LSE, residual D, up 4D, gelu 4D
    "none": (2 * COLUMN + 14 * D + LSE, 0),
    "full": (0, QKV + OUT + UP),
    "full_to_the_end": (0, QKV + OUT + UP + DOWN),
    "full_reentrant": (0, QKV + OUT + UP + DOWN),
    "selective_layer": (0, QKV + OUT + UP),
    # every product 3D + D + 4D + D, and attention D + LSE
    "selective_op": (10 * D + LSE, 0),
    # the second and the fourth product are not saved; the fourth is not needed
    "every_second_matmul": (8 * D + LSE, OUT),
    # on CPU neither preset knows the attention kernel; both recompute the second product
    "torchtitan_preset": (7 * D, OUT),
    "modalities_preset": (7 * D, OUT),
    "offload": (0, 0),
    # of one block little is at the peak: mean and deviation of the norm are made again, without a product
    "budget": (14 * D + LSE, 0),
    # rewinding keeps what the block's buffer held
    "nested": (SCALE, QKV + OUT + UP),
    "one_region_of_all": (SCALE, QKV + OUT + UP),
    # the recomputation of the outer region ends where the inner one has its input, before any product
    "each_block_in_two_regions": (SCALE, QKV + OUT + UP),
    "nested_to_the_end": (SCALE, 2 * (QKV + OUT + UP + DOWN)),
} | {
    row: numbers
    for row, numbers in {
        "torch_remat": (0, QKV + OUT + UP + DOWN),
        # mean and deviation of the norm and its output D; the output of up 4D, whose input is recomputed
        "torch_remat_keeps_modules": (2 * COLUMN + 5 * D, QKV + OUT + DOWN),
    }.items()
    if row in SETTINGS
}


def test_honesty_every_variant_has_a_row() -> None:
    assert {SETTINGS[row].variant for row in HONESTY} == set(APPLIED)


@pytest.mark.parametrize(("saved_bytes", "recomputed_flops"), HONESTY.values(), ids=HONESTY)
def test_honesty_saved_bytes_and_recomputed_flops(
    request: pytest.FixtureRequest, saved_bytes: int, recomputed_flops: int
) -> None:
    setting = SETTINGS[request.node.callspec.id]
    measured = measure_reference(setting)
    plain = measure_reference(SETTINGS["none"])
    assert measured.saved_bytes == saved_bytes
    assert measured.backward_flops - plain.backward_flops == recomputed_flops


def measure_reference(setting: Setting) -> Any:
    """Return what the reference block costs: bias-free, no dropout, 8 tokens."""
    torch.manual_seed(0)
    model = Stack(Block(bias=False, dropout=0.0))
    setting.make(ac_freq=1, fraction=0.998).apply(model)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    model(x)
    return measure(model, x)
