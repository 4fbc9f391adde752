"""Properties that the suites of peers hold their own checkpoints to, one table a suite, in our own words.

Each case trains a model of blocks, plain and under each variant; what a step shows must be equal to the bit.

Read: torch's tests of checkpoint, selective checkpoint and nested checkpoints, torchtitan, transformers,
fairscale and DeepSpeed. Those of FSDP are in `tests/parity/test_fsdp.py` and
`tests/strategies/nested/test_units.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies import Strategy
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload
from strategies.ac.selective_layer import SelectiveLayer
from strategies.ac.selective_op import SelectiveOp
from tests.strategies.toys import WIDTH

VARIANTS: dict[str, Strategy] = {
    "full": Full(layers_fqn="layers"),
    "full, to the end": Full(layers_fqn="layers", early_stop=False),
    "full, reentrant": Full(layers_fqn="layers", use_reentrant=True),
    "full, offloading": Full(layers_fqn="layers", offload=True),
    "full, rewinding": Full(layers_fqn="layers", rewind=True),
    "selective_layer": SelectiveLayer(layers_fqn="layers", ac_freq=2),
    "selective_op": SelectiveOp(layers_fqn="layers", save_ops=("matmul", "topk", "max")),
    "nested": Nested(layers_fqn="layers"),
    "nested, three levels": Nested(layers_fqn="layers", levels=[1, 2, 2], early_stop=False),
    "offload": Offload(layers_fqn="layers"),
}
STATELESS = frozenset(VARIANTS) - {"full, rewinding", "nested", "nested, three levels", "offload"}
"""Variants that recompute with the state of backward: blocks with state are not for them."""

REENTRANT = frozenset({"full, reentrant"})


class Blocks(nn.Module):
    """Blocks with two layers each, whose forward is a function."""

    def __init__(self, function: Callable[..., Any], count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(function) for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


class Block(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def inputs(*, requires_grad: bool = True) -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_(requires_grad)


def mlp(m: Block, x: Tensor) -> Tensor:
    y: Tensor = x + m.dropout(m.b(m.a(m.norm(x)).relu()))
    return y


def shown(model: nn.Module, *others: Any) -> list[Any]:
    """Return gradients and buffers, and what else a step shows."""
    return [*others, *(each.grad for each in model.parameters()), *model.buffers(), torch.get_rng_state()]


def trained(*args: Any, grad: bool = True, **kwargs: Any) -> Callable[[nn.Module], list[Any]]:
    """Return a step that sums the squares of whatever tensors the model returns."""

    def step(model: nn.Module) -> list[Any]:
        x = inputs(requires_grad=grad)
        leaves = [each for each in tree_leaves(model(x, *args, **kwargs)) if isinstance(each, Tensor)]
        sum(each.square().sum() for each in leaves if each.requires_grad).backward()  # type: ignore[union-attr]
        return shown(model, x.grad, *(each.detach() for each in leaves))

    return step


def twice_in_flight(model: nn.Module) -> list[Any]:
    xs = [inputs(), inputs()]
    outputs = [model(x * scale) for x, scale in zip(xs, (1.0, 2.0), strict=True)]
    for each in reversed(outputs):
        each.square().sum().backward()
    return shown(model, *(x.grad for x in xs))


def twice_backward(model: nn.Module) -> list[Any]:
    x = inputs()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return shown(model, x.grad)


def penalised(model: nn.Module) -> list[Any]:
    x = inputs()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return shown(model, gradient.detach())


def some_gradients(model: nn.Module) -> list[Any]:
    weights = [model.get_parameter("layers.0.a.weight"), model.get_parameter("layers.3.b.bias")]
    return [*torch.autograd.grad(model(inputs()).square().sum(), weights)]


def without_gradients(model: nn.Module) -> list[Any]:
    with torch.no_grad():
        outputs = model(inputs())
    return [outputs, outputs.requires_grad]


def through_autocast(model: nn.Module) -> list[Any]:
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
    loss.backward()
    return shown(model, x.grad)


def three_steps(model: nn.Module) -> list[Any]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(3):
        loss = model(inputs(requires_grad=False)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(each.detach() for each in model.parameters())]


def in_hooks(model: nn.Module) -> list[Any]:
    x = inputs()
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().sum()
    loss.backward()
    return shown(model, x.grad)


def evaluated(model: nn.Module) -> list[Any]:
    model.eval()
    return trained()(model)


def half_frozen(model: nn.Module) -> list[Any]:
    for layer in list(model.get_submodule("layers").children())[:2]:
        layer.requires_grad_(requires_grad=False)
    return trained(grad=False)(model)


def adapted(model: nn.Module) -> list[Any]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".b." in name)
    return trained(grad=False)(model)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return y * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _, y = ctx.saved_tensors
        return gradients[0] * (1 - y * y) * ctx.scale, None


def structured(m: Block, x: Any) -> dict[str, Any]:
    hidden = x["hidden"] if isinstance(x, dict) else x
    return {"hidden": m.a(hidden).tanh(), "more": (None, 3, "kept", [m.b(hidden).sin()])}


def routed(m: Block, x: Tensor) -> Tensor:
    weights, experts = m.b(x).softmax(-1).topk(2)
    y: Tensor = x + weights.sum(-1, keepdim=True) * m.a(x) * (experts.float().mean() / WIDTH)
    return y


def rotated(m: Block, x: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) * 0.1)
    turned = torch.view_as_real(torch.view_as_complex(m.a(x).view(3, -1, 2)) * angles).flatten(1)
    y: Tensor = x + m.b(turned)
    return y


def attended(m: Block, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    scores = m.a(x) @ x.t() * scale
    scores = scores if mask is None else scores.masked_fill(mask, float("-inf"))
    y: Tensor = x + m.b(m.dropout(scores.softmax(-1)) @ x)
    return y


MASK = torch.ones(3, 3, dtype=torch.bool).triu(1)
_Case = tuple[Callable[..., Any], Callable[[nn.Module], list[Any]], frozenset[str]]
NOBODY: frozenset[str] = frozenset()

TORCH_CHECKPOINT: dict[str, _Case] = {
    # name: (forward of each block, step, variants that it is not for)
    "dropout draws the same numbers": (mlp, trained(), NOBODY),
    "no input requires a gradient": (mlp, trained(grad=False), NOBODY),
    "an argument that is no tensor": (lambda m, x, n, s: m.a(x) * n + len(s), trained(2, "abc"), NOBODY),
    "an argument by keyword": (attended, trained(mask=MASK, scale=0.5), NOBODY),
    # torch's reentrant function gives zeros to weights of results that nobody uses
    "results in structures, some of them none": (structured, trained(), REENTRANT),
    "a tensor that requires none among those that do": (
        lambda m, x: (m.a(x[0] if isinstance(x, tuple) else x), x[1] if isinstance(x, tuple) else MASK),
        trained(),
        NOBODY,
    ),
    "a part without gradients": (
        lambda m, x: m.a(x) * torch.no_grad()(lambda: m.b(x).sigmoid())(),
        trained(),
        NOBODY,
    ),
    "a function of autograd": (lambda m, x: Own.apply(m.a(x), 0.5), trained(), NOBODY),  # type: ignore[no-untyped-call]
    "a result that nobody uses": (lambda m, x: (m.b(x).exp(), m.a(x).sin())[1], trained(), NOBODY),
    "an own checkpoint inside": (
        lambda m, x: torch.utils.checkpoint.checkpoint(lambda y: m.a(y).sin(), x, use_reentrant=False),
        trained(),
        REENTRANT,  # its recomputation stands in no graph
    ),
    "two batches in flight": (mlp, twice_in_flight, NOBODY),
    "two backwards": (mlp, twice_backward, NOBODY),
    "gradients of a few weights": (mlp, some_gradients, REENTRANT),  # torch: `autograd.grad` is not for it
    "a penalty on gradients": (lambda m, x: m.a(x).sin(), penalised, REENTRANT),  # as above
    "no graph without gradients": (mlp, without_gradients, NOBODY),
    "autocast in forward alone": (mlp, through_autocast, NOBODY),
    "hooks of the caller around it": (mlp, in_hooks, NOBODY),
}
TORCH_SELECTIVE: dict[str, _Case] = {
    "a kept product that is written": (lambda m, x: m.b(m.a(x).mul_(3).sin()), trained(), NOBODY),
    "a kept result of three dimensions that is written": (
        lambda m, x: m.a(x[None]).mul_(3).sin()[0],
        trained(),
        NOBODY,
    ),
    "an operator of several results": (lambda m, x: m.a(x).max(-1, keepdim=True)[0] * x, trained(), NOBODY),
    "dropout after a kept product": (lambda m, x: m.dropout(m.a(x)).sin(), trained(), NOBODY),
    "a product of a part of a kept one": (
        lambda m, x: x + (m.a(x)[:, :4] @ m.a(x)[:, :4].t()) @ x,
        trained(),
        NOBODY,
    ),
    "two backwards through what is kept": (lambda m, x: m.b(m.a(x).sin()), twice_backward, NOBODY),
}
TORCH_NESTED: dict[str, _Case] = {
    "the same block again": (lambda m, x: mlp(m, mlp(m, x)), trained(), NOBODY),
    "a gradient in forward": (
        lambda m, x: x + torch.autograd.grad(m.a(x).sin().sum(), x, create_graph=True)[0],
        trained(),
        REENTRANT,  # forward runs without autograd
    ),
    "an attribute of a saved tensor": (
        lambda m, x: Own.apply(m.a(x), getattr(x, "gain", 0.5)),  # type: ignore[no-untyped-call]
        trained(),
        NOBODY,
    ),
}
TORCHTITAN: dict[str, _Case] = {
    "losses and weights of three steps": (mlp, three_steps, NOBODY),
    "experts that are chosen": (routed, trained(), NOBODY),
    "complex rotations": (rotated, trained(), NOBODY),
}
TRANSFORMERS: dict[str, _Case] = {
    "a mask by keyword, and none": (attended, trained(mask=None), NOBODY),
    "weights in eval mode train too": (mlp, evaluated, NOBODY),
    "adapters behind frozen layers": (lambda m, x: m.a(x) + m.b(x), adapted, NOBODY),
    "first layers frozen": (mlp, half_frozen, NOBODY),
}
FAIRSCALE: dict[str, _Case] = {
    "batch statistics move once": (lambda m, x: m.statistics(m.a(x)), trained(), STATELESS),
    # as above
    "one input for many results": (
        lambda m, x: (
            m.a(x[0] if isinstance(x, tuple) else x),
            m.b(x[0] if isinstance(x, tuple) else x).sin(),
        ),
        trained(),
        REENTRANT,
    ),
    "many calls before backward": (mlp, twice_in_flight, NOBODY),
}
DEEPSPEED: dict[str, _Case] = {
    "a mask of truth values beside the hidden state": (
        lambda m, x, mask: m.a(x).masked_fill(mask, 0.0),
        trained(torch.arange(WIDTH) % 2 == 0),
        NOBODY,
    ),
    "a mask that is returned": (
        lambda m, x: (m.a(x[0]), x[1]) if isinstance(x, tuple) else (m.a(x), MASK),
        trained(),
        NOBODY,
    ),
    "whole numbers that are returned": (
        lambda m, x: (y := m.a(x["hidden"] if isinstance(x, dict) else x), {"hidden": y, "at": y.argmax(-1)})[
            1
        ],
        trained(),
        NOBODY,
    ),
    "none among the arguments": (
        lambda m, x, nothing: m.a(x).sin() if nothing is None else x,
        trained(None),
        NOBODY,
    ),
}
SUITES: dict[str, dict[str, _Case]] = {
    "torch's checkpoint": TORCH_CHECKPOINT,
    "torch's selective checkpoint": TORCH_SELECTIVE,
    "torch's nested checkpoints": TORCH_NESTED,
    "torchtitan": TORCHTITAN,
    "transformers": TRANSFORMERS,
    "fairscale": FAIRSCALE,
    "DeepSpeed": DEEPSPEED,
}


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(variant, case, id=f"{suite}: {name}, {variant}")
        for suite, cases in SUITES.items()
        for name, case in cases.items()
        for variant in VARIANTS
        if variant not in case[2]
    ],
)
def test_a_step_shows_what_it_shows_without(variant: str, case: _Case) -> None:
    function, step, _ = case
    plain, steps = Blocks(function), []
    for model in (plain, VARIANTS[variant].apply(copy.deepcopy(plain))):
        torch.manual_seed(1)
        steps.append(step(model))
    assert [type(each) for each in steps[0]] == [type(each) for each in steps[1]]
    for expected, actual in zip(*steps, strict=True):
        assert torch.equal(expected, actual) if isinstance(expected, Tensor) else expected == actual
