"""full: both implementations of torch, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from strategies import StrategyError
from strategies.ac.full import Full
from strategies.regions.region import regions
from tests.strategies.meters import measure
from tests.strategies.toys import Stack


class Nested(nn.Module):
    """Takes and returns tensors inside structures, with something that is no tensor among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, str], *, more: dict[str, Tensor]) -> dict[str, Any]:
        hidden = self.linear(pair[0]) * more["scale"]
        return {"hidden": (hidden, hidden.relu()), "note": pair[1]}


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_nested_inputs_and_outputs_take_part_in_autograd(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Nested()
    gradients = []
    for is_enclosed in (False, True):
        model = Stack(plain)
        x, scale = torch.ones(2, 4, requires_grad=True), torch.full((4,), 2.0, requires_grad=True)
        if is_enclosed:
            Full(layers_fqn="layers", use_reentrant=use_reentrant).apply(model)
        plain.zero_grad()
        outputs = model.block((x, "kept"), more={"scale": scale})
        assert outputs["note"] == "kept"
        (outputs["hidden"][0] + outputs["hidden"][1]).sum().backward()
        assert plain.linear.weight.grad is not None
        gradients.append((x.grad, scale.grad, plain.linear.weight.grad.clone()))
    for expected, actual in zip(*gradients, strict=True):
        assert expected is not None
        assert torch.equal(expected, actual)


KEPT_ELSEWHERE = torch.full((4,), 3.0)

RETURNED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    # what a block returns beside its result, and whether it is the same tensor for its caller
    "a buffer": lambda m, _x, _mask: m.table,
    "a buffer in a structure": lambda m, _x, _mask: (None, {"table": m.table}),
    "a parameter": lambda m, _x, _mask: m.scale,
    "a tensor of an attribute": lambda m, _x, _mask: m.constant,
    "an input": lambda _m, x, _mask: x,
    "an input without a gradient": lambda _m, _x, mask: mask,
    "a view of a buffer": lambda m, _x, _mask: m.table[:2],
    "a part of the result": lambda m, x, _mask: m.linear(x).sin(),
    "nothing": lambda _m, _x, _mask: None,
}


class Returning(nn.Module):
    def __init__(self, returned: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("table", torch.ones(4))
        self.constant, self.returned = torch.full((4,), 5.0), returned

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.linear(x) * mask * self.scale, self.returned(self, x, mask)


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_reentrant_leaves_alone_what_a_block_returns_and_has_not_made(returned: Any) -> None:
    shown = []
    for is_enclosed in (False, True):
        block = Returning(returned)
        model = Stack(block)
        if is_enclosed:
            Full(layers_fqn="layers", use_reentrant=True).apply(model)
        x, mask = torch.ones(2, 4, requires_grad=True), torch.tensor([1.0, 2.0, 0.0, 1.0])
        result, other = model.block(x, mask)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(other) if isinstance(leaf, Tensor)]
        loss = result.square().sum() + sum(leaf.sum() for leaf in leaves if leaf.requires_grad)
        loss.backward()
        is_stored = [
            leaf is each for leaf in leaves for each in (block.table, block.constant, mask, block.scale)
        ]
        history = [block.table.requires_grad, block.constant.requires_grad, mask.requires_grad]
        shown.append((is_stored, history, x.grad, *(each.grad for each in block.parameters())))
    assert shown[0][:2] == shown[1][:2]
    assert all(map(torch.equal, shown[0][2:], shown[1][2:]))  # type: ignore[arg-type]


def test_reentrant_gives_no_history_to_a_tensor_that_nobody_knows() -> None:
    block = Returning(lambda _m, _x, _mask: [KEPT_ELSEWHERE])
    model = Full(layers_fqn="layers", use_reentrant=True).apply(Stack(block))
    result, _ = model.get_submodule("layers.0")(torch.ones(2, 4, requires_grad=True), torch.ones(4))
    result.sum().backward()
    assert not KEPT_ELSEWHERE.requires_grad


def test_reentrant_gives_gradients_where_no_input_requires_grad() -> None:
    plain = nn.Linear(4, 4)
    plain(torch.ones(2, 4)).sum().backward()
    assert plain.weight.grad is not None
    expected = plain.weight.grad.clone()
    plain.zero_grad()
    model = Stack(plain)
    Full(layers_fqn="layers", use_reentrant=True).apply(model)
    model.block(torch.ones(2, 4)).sum().backward()
    assert torch.equal(plain.weight.grad, expected)


def test_reentrant_lets_a_frozen_block_pass() -> None:
    model = Stack(nn.Linear(4, 4).requires_grad_(False))
    Full(layers_fqn="layers", use_reentrant=True).apply(model)
    assert not model.block(torch.ones(2, 4)).requires_grad


def test_without_preserved_rng_state_dropout_gets_other_gradients() -> None:
    torch.manual_seed(0)
    model = Stack(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)))
    gradients = []
    for strategy in (None, Full(layers_fqn="layers", preserve_rng_state=False)):
        if strategy is not None:
            strategy.apply(model)
        x = torch.ones(2, 64, requires_grad=True)
        torch.manual_seed(1)
        model.block(x).sum().backward()
        gradients.append(x.grad)
    assert not torch.equal(gradients[0], gradients[1])  # type: ignore[arg-type]


def with_own_forward() -> nn.Module:
    block: Any = nn.Linear(4, 4)
    block.forward = lambda x: nn.Linear.forward(block, x) * 2
    return block  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [with_own_forward, lambda: torch.compile(nn.Linear(4, 4), backend="eager")],
    ids=["hook", "compile"],
)
def test_a_forward_set_on_the_instance_is_refused(make: Callable[[], nn.Module]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4), make()])
    with pytest.raises(StrategyError) as error:
        Full(layers_fqn="layers").apply(model)
    assert str(error.value) == (
        "ac: 'layers.1' has a forward set on the instance, which no region can hold; "
        "make it a method of the module's class, or of a module that holds this one"
    )
    assert regions(model) == {}


def test_a_forward_may_be_set_on_the_instance_afterwards() -> None:
    model = Stack(nn.Linear(4, 4))
    Full(layers_fqn="layers", early_stop=False).apply(model)
    enclosed = model.block.forward
    model.block.forward = lambda x: enclosed(x) * 2  # type: ignore[method-assign]
    measured = measure(model.block, torch.ones(2, 4, requires_grad=True))
    assert measured.backward_flops == 3 * measured.forward_flops  # gradients of input and weight, and again


def test_a_forward_set_inside_a_block_runs_in_its_region() -> None:
    model = Stack(nn.Sequential(with_own_forward()))
    Full(layers_fqn="layers", early_stop=False).apply(model)
    measured = measure(model.block, torch.ones(2, 4, requires_grad=True))
    assert measured.backward_flops == 3 * measured.forward_flops


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def test_checkpointing_of_transformers_is_refused() -> None:
    model: Any = llama()
    model.activation_checkpointing_enable()
    message = (
        "ac: 'model' has gradient_checkpointing on; "
        "call activation_checkpointing_disable() on the model before"
    )
    strategy = Full(layers_fqn="model.layers")
    for refused in (strategy.apply, strategy.call_site):
        with pytest.raises(StrategyError) as error:
            refused(model)
        assert str(error.value) == message
    model.activation_checkpointing_disable()
    strategy.apply(model)


def test_checkpointing_of_timm_is_refused() -> None:
    model: Any = Stack(nn.Linear(4, 4))
    model.grad_checkpointing = True  # as every model of timm has it
    with pytest.raises(StrategyError) as error:
        Full(layers_fqn="layers").apply(model)
    assert str(error.value) == (
        "ac: 'Stack' has grad_checkpointing on; call set_grad_checkpointing(False) on the model before"
    )


def test_a_wrapper_of_torch_is_refused() -> None:
    model = Stack(checkpoint_wrapper(nn.Linear(4, 4)))
    with pytest.raises(StrategyError) as error:
        Full(layers_fqn="layers").apply(model)
    assert str(error.value) == "ac: 'layers.0' is already checkpointed; apply one variant to a model"
