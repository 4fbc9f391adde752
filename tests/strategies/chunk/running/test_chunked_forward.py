"""Whatever a forward does between its products, plans for it give the results and gradients of plain code."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.base import PlannedStep
from strategies.chunk import ChunkPlan, InfeasibleBudget
from strategies.chunk.planning.chunk_plan import ChunkPlanner

B, S, D, WIDE = 2, 22, 16, 64


def _writes_in_place(h: Tensor) -> Tensor:
    h = functional.silu(h)
    h.mul_(2.0)
    h += 1
    return functional.relu_(h)


def _writes_to_views(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., :D].mul_(3.0)
    h[:, ::2] = 0
    return h


def _mixes_in_another_order(h: Tensor) -> Tensor:
    rows = torch.arange(S - 1, -1, -1)
    return h[:, rows] + h.index_select(1, rows) + h.flip(1) + torch.roll(h, 1, 1) + h.cumsum(1)


def _outer_product(h: Tensor) -> Tensor:
    pairs = h[:, :, None, :D] * h[:, None, :, :D]
    return h + functional.pad(pairs.sum(2), (0, WIDE - D)) + functional.pad(pairs.mean(1), (D, WIDE - 2 * D))


def _largest(h: Tensor) -> Tensor:
    at = h.argmax(-1, keepdim=True)
    return h + h.gather(-1, at) + h.amax(1, keepdim=True) + h.topk(3, -1).values.sum(-1, keepdim=True)


def _attends(h: Tensor) -> Tensor:
    scores = torch.einsum("bsd,btd->bst", h, h).softmax(-1)
    return torch.einsum("bst,btd->bsd", scores, h)


def _positions(h: Tensor) -> Tensor:
    at = torch.arange(S, dtype=h.dtype)[None, :, None]
    return h * at.sin() + torch.ones(S, S, dtype=h.dtype).tril() @ h


def _depthwise(h: Tensor) -> Tensor:
    kernel = torch.ones(WIDE, 1, 3, dtype=h.dtype)
    return functional.conv1d(h.transpose(1, 2), kernel, padding=1, groups=WIDE).transpose(1, 2)


def _halves(h: Tensor) -> Tensor:
    one, other = torch.cat([h[:, 1:], h[:, :1]], 1).chunk(2, -1)
    return torch.cat([one * other.sigmoid(), other], -1)


def _pads_and_repeats(h: Tensor) -> Tensor:
    padded = functional.pad(h, (0, 0, 1, 0))[:, :-1] + functional.pad(h, (0, 0, 0, 2))[:, 2:]
    return padded + h.repeat(1, 2, 1)[:, :S] + h.repeat_interleave(2, 1)[:, S:]


BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "writes in place": _writes_in_place,
    "writes to views": _writes_to_views,
    "rows in another order": _mixes_in_another_order,
    "outer product": _outer_product,
    "largest": _largest,
    "attention without projections": _attends,
    "positions and a mask": _positions,
    "depthwise convolution": _depthwise,
    "halves": _halves,
    "pads and repeats": _pads_and_repeats,
    "norms": lambda h: (
        functional.normalize(h, dim=-1) + h / h.norm(dim=1, keepdim=True) + h.std(dim=1, keepdim=True)
    ),
    "sums": lambda h: h / h.sum(-1, keepdim=True).abs().clamp_min(1) + h.mean(1, keepdim=True) + h.sum(),
    "detached": lambda h: h * h.detach().sigmoid() + h.detach(),
    "where": lambda h: torch.where(h > 0, h, h.exp() - 1).masked_fill(h < -2, 0.0),
    "rows of the batch merged": lambda h: functional.gelu(h.reshape(B * S, WIDE)).reshape(B, S, WIDE),
    "strided view": lambda h: h.as_strided((B, S, WIDE), (S * WIDE, WIDE, 1)) + h,
}


class _Block(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, WIDE)
        self.down = nn.Linear(WIDE, D)
        self.body = body

    def forward(self, x_BSD: Tensor) -> Tensor:
        outputs: Tensor = x_BSD + self.down(self.body(functional.gelu(self.up(self.norm(x_BSD)))))
        return outputs


def _loss(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def _results(model: nn.Module, x_BSD: Tensor, *, training: bool) -> list[Tensor]:
    if not training:
        with torch.no_grad():
            return [model(x_BSD)]
    given = x_BSD.clone().requires_grad_()
    outputs = model(given)
    _loss(outputs).backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in (given, *model.parameters()) if each.grad is not None]
    return [outputs.detach(), *gradients]


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", BODIES)
def test_plans_give_what_plain_code_gives(name: str, *, training: bool) -> None:
    torch.manual_seed(0)
    model = _Block(BODIES[name]).double()
    x_BSD = torch.randn(B, S, D, dtype=torch.float64)
    step = PlannedStep(loss=_loss) if training else None
    expected = _results(copy.deepcopy(model), x_BSD, training=training)
    planning = ChunkPlanner.of(model, (x_BSD,), training=training, step=step)
    for budget_bytes in (None, int(0.7 * planning.unchunked_peak_bytes)):
        try:
            plan = planning.plan(budget_bytes)
        except InfeasibleBudget:
            continue
        actual = _results(plan.apply(copy.deepcopy(model)), x_BSD, training=training)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


class _Gated(nn.Module):
    """Up, something, down; `scale` is a plain number."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.up = nn.Linear(width, WIDE)
        self.down = nn.Linear(WIDE, width)
        self.register_buffer("average", torch.zeros(width))
        self.average: Tensor
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.scale * self.down(functional.gelu(self.up(x)))
        return outputs


class _WithoutGradient(_Gated):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate, _ = self.up(x).softmax(-1).sort(-1)
        outputs: Tensor = x + self.down(self.up(x) * gate)
        return outputs


class _Averages(_Gated):
    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)) * 0.1)
        return super().forward(x + self.average)


class _WritesToInput(_Gated):
    def forward(self, x: Tensor) -> Tensor:
        x += self.down(functional.gelu(self.up(x * 1)))
        return x


class _Layers(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        rows = x.view(-1, D)
        for layer in self.layers:
            x = layer(x)
        return x + rows.view_as(x)


@pytest.mark.parametrize("layer", [_WithoutGradient, _Averages, _WritesToInput])
def test_state_and_detached_parts_are_those_of_plain_code(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = _Layers(layer).double()
    x_BSD = torch.randn(B, S, D, dtype=torch.float64)
    plan = ChunkPlan.make(model, (x_BSD,), training=True, step=PlannedStep(loss=_loss))
    assert plan.regions
    planned = plan.apply(copy.deepcopy(model))
    for _ in range(2):
        expected = _results(model, x_BSD, training=True)
        torch.testing.assert_close(_results(planned, x_BSD, training=True), expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(planned.state_dict(), model.state_dict(), rtol=1e-11, atol=1e-13)


def test_a_number_that_forward_reads_may_change() -> None:
    torch.manual_seed(0)
    model = _Layers(_Gated).double()
    x_BSD = torch.randn(B, S, D, dtype=torch.float64)
    planned = ChunkPlan.make(model, (x_BSD,), training=True).apply(copy.deepcopy(model))
    for scale in (1.0, 0.5, 1.0):
        for each in (model, planned):
            each.get_submodule("layers.1").scale = scale  # type: ignore[assignment]
        expected = _results(model, x_BSD, training=True)
        torch.testing.assert_close(_results(planned, x_BSD, training=True), expected, rtol=1e-11, atol=1e-13)


class _NormOfTheBatch(_Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(D))
        self.variance: Tensor

    def forward(self, x: Tensor) -> Tensor:
        normal = functional.batch_norm(x.reshape(-1, D), self.average, self.variance, training=self.training)
        return super().forward(normal.view(x.shape))


@pytest.mark.parametrize("planned_for_training", [True, False])
def test_statistics_of_batches_are_taken_once(*, planned_for_training: bool) -> None:
    torch.manual_seed(0)
    model = _Layers(_NormOfTheBatch).double()
    x_BSD = torch.randn(B, S, D, dtype=torch.float64)
    planned = copy.deepcopy(model)
    for layer in planned.layers:
        layer.train(planned_for_training)
    plan = ChunkPlan.make(planned, (x_BSD,), fraction=0.6, training=True, step=PlannedStep(loss=_loss))
    plan.apply(planned).train()
    expected, actual = _results(model, x_BSD, training=True), _results(planned, x_BSD, training=True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    for one, other in zip(model.buffers(), planned.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


class _Channels(nn.Module):
    """Norms of the batch between convolutions that mix all channels, pairs of them, and none."""

    def __init__(self, *, shares_a_norm: bool = False) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.BatchNorm2d(16) for _ in range(3)))
        self.up, self.down = nn.Conv2d(4, 16, 3, padding=1, bias=False), nn.Conv2d(16, 4, 1, bias=False)
        self.each = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.pairs = nn.Conv2d(16, 16, 3, padding=1, groups=8)
        if shares_a_norm:
            self.norms[1] = self.norms[0]

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norms[0](self.up(x)), inplace=True)
        h = functional.hardswish(self.norms[1](self.each(h)), inplace=True)
        outputs: Tensor = x + self.down(functional.silu(self.norms[2](self.pairs(h))))
        return outputs


@pytest.mark.parametrize("mode", ["training", "training without gradients", "evaluation"])
def test_channels_of_norms_of_batches_are_chunked(mode: str) -> None:
    torch.manual_seed(0)
    model = _Channels().double().train(mode != "evaluation")
    x_BCHW = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    training = mode == "training"
    planned = copy.deepcopy(model)
    plan = ChunkPlan.make(planned, (x_BCHW,), training=training, step=PlannedStep(loss=_loss))
    plan.apply(planned)
    norms = [name for region in plan.regions for name in region.operators if "batch_norm" in name]
    assert len(norms) == len(model.norms)
    for _ in range(2):
        expected = _results(model, x_BCHW, training=training)
        torch.testing.assert_close(
            _results(planned, x_BCHW, training=training), expected, rtol=1e-10, atol=1e-15
        )
        torch.testing.assert_close(planned.state_dict(), model.state_dict(), rtol=1e-12, atol=0)


def test_a_norm_of_the_batch_that_is_called_twice_keeps_its_order() -> None:
    torch.manual_seed(0)
    model = _Channels(shares_a_norm=True).double()
    x_BCHW = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    planned = copy.deepcopy(model)
    plan = ChunkPlan.make(planned, (x_BCHW,), training=True, step=PlannedStep(loss=_loss))
    plan.apply(planned)
    norms = [name for region in plan.regions for name in region.operators if "batch_norm" in name]
    assert len(norms) <= 1
    expected = _results(model, x_BCHW, training=True)
    torch.testing.assert_close(_results(planned, x_BCHW, training=True), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(planned.state_dict(), model.state_dict(), rtol=1e-12, atol=0)


class _Teaching(nn.Module):
    """The last block is called without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Gated() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, teacher = self.layers
        with torch.no_grad():
            target: Tensor = teacher(x)
        outputs: Tensor = second(first(x)) - target
        return outputs


@pytest.mark.parametrize("fraction", [0.7, 0.5])
def test_a_block_called_without_gradients_gets_none(fraction: float) -> None:
    torch.manual_seed(0)
    model = _Teaching().double()
    x_BSD = torch.randn(B, S, D, dtype=torch.float64)
    plan = ChunkPlan.make(model, (x_BSD,), fraction=fraction, training=True, step=PlannedStep(loss=_loss))
    planned = plan.apply(copy.deepcopy(model))
    expected, actual = _results(model, x_BSD, training=True), _results(planned, x_BSD, training=True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert all(each.grad is None for each in planned.get_submodule("layers.2").parameters())
