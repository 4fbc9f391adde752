"""Modules as people write them: planned at half of their bytes, and compared with the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from bench.chunking.chunk_attempt import relative_difference
from strategies.base import PlannedStep, StrategyError
from strategies.chunk import ChunkPlan
from tests.covering import marked
from tests.strategies.chunk.measuring import forward_peak_bytes, loss_of, training_peak_bytes
from tests.strategies.toys import Function

B, S, D = 2, 48, 16


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return outputs


class _Behind(nn.Module):
    """A feed-forward network behind something."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.part = part()
        self.mlp = _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.mlp(self.part(x))
        return outputs


class _Stack(nn.Module):
    """Blocks in a list of any name; of two that are alike, each may run again as a whole."""

    def __init__(self, part: Callable[[], nn.Module], name: str = "layers", count: int = 2) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.ModuleList(_Behind(part) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self, self.name):
            x = layer(x)
        return x


class _Acts(nn.Module):
    """Blocks that are called with their activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Activated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, (torch.tanh, functional.gelu), strict=True):
            x = layer(x, act=act)
        return x


class _Activated(_Mlp):
    def forward(self, x: Tensor, *, act: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
        outputs: Tensor = x + self.down(act(self.up(self.norm(x))))
        return outputs


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(D, D // 4, batch_first=True)
        self.out = nn.Linear(D // 4, D)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.out(self.memory(x)[0])
        return outputs


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return outputs


class _Waves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        outputs: Tensor = x.cos() * gradient
        return outputs


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class _Remembers(nn.Module):
    """Sets a mark in its first call, which changes nothing of what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "is_ready"):
            self.is_ready = True
        return x * 2


class _ByKeyword(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.model(input_ids=tokens, return_dict=False)[0]
        return outputs


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x).squeeze().unsqueeze(-1)
        return x * gate + x.unsqueeze(1).squeeze(1)


class _SharesZeros(nn.Module):
    """The first of two blocks makes a bias, which has no gradient, for both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Biased() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class _Biased(_Mlp):
    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        bias = torch.zeros(*x.shape[:2], 4 * D) if bias is None else bias
        return x + self.down(functional.gelu(self.up(self.norm(x)) + bias)), bias


def _turns_all_columns(x: Tensor) -> Tensor:
    turned, rest = x[..., :D], x[..., D:]
    return torch.cat((turned.sin(), rest), -1)


def _self_attention(x: Tensor) -> Tensor:
    h = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return x + functional.scaled_dot_product_attention(h, h, h).transpose(1, 2).flatten(2)


def _noise(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


def _drops_columns(x: Tensor) -> Tensor:
    return functional.dropout(x.transpose(1, 2), 0.3).transpose(1, 2)


def _experts(x: Tensor) -> Tensor:
    ends = torch.tensor([S // 2, x.size(0) * S], dtype=torch.int32)
    outputs: Tensor = torch._grouped_mm(x.flatten(0, 1), x.new_ones(2, D, D) / D, offs=ends).view_as(x)
    return outputs


class _Encoder(nn.Module):
    """torch's encoder, with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.size(1)).expand(x.shape[:2]) >= S - 8
        outputs: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return outputs


class _UNetOfAttentions(nn.Module):
    """As diffusers writes one: convolutions and attention in lists side by side, groups, resampling."""

    def __init__(self) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, D), nn.SiLU(inplace=True), nn.Conv2d(D, D, 3, padding=1))
            for _ in range(2)
        )
        self.attentions = nn.ModuleList(_Attends() for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        image = (
            x.transpose(1, 2).unflatten(2, (6, -1)).contiguous()
        )  # torch 2.13 ends in a segmentation fault otherwise
        for resnet, attention in zip(self.resnets, self.attentions, strict=True):
            image = image + self.dropout(resnet(image * 1.0))
            tokens = attention(image.flatten(2).transpose(1, 2))
            image = tokens.transpose(1, 2).reshape(image.shape).contiguous()
        small = functional.interpolate(image, scale_factor=0.5, mode="nearest")
        outputs: Tensor = image + functional.interpolate(small, scale_factor=2.0, mode="nearest")
        return outputs.flatten(2)


IDIOMS: dict[str, Callable[[], nn.Module]] = {
    "dropout of a half": lambda: _Stack(lambda: nn.Dropout(0.5)),
    "dropout of columns": lambda: _Stack(lambda: Function(_drops_columns), count=1),
    "dropout of channels": lambda: _Stack(lambda: nn.Dropout1d(0.5), count=1),
    "squeezes": lambda: _Stack(_Norms, count=1),
    "a part of no columns": lambda: _Stack(lambda: Function(_turns_all_columns), count=1),
    "zeros for all blocks": _SharesZeros,
    "a tensor attends to itself": lambda: _Stack(lambda: Function(_self_attention), count=1),
    "torch's attention": lambda: _Stack(_Attends, count=1),
    "a function by keyword": _Acts,
    "a list called attentions": lambda: _Stack(_Attends, "attentions"),
    "torch's encoder": _Encoder,
    "experts in one product": lambda: _Stack(lambda: Function(_experts), count=1),
    "a recurrent layer": lambda: _Stack(_Recurrent, count=1),
    "a function with a backward of its own": lambda: _Stack(
        lambda: Function(_Waves.apply),
        count=1,
    ),
    "a counter": lambda: _Stack(_Counts),
    "a mark": lambda: _Stack(_Remembers),
    "a generator of its own": lambda: _Stack(lambda: Function(_noise)),
    "convolutions and attentions": _UNetOfAttentions,
}
_DIFFERENT = (  # without gradients
    "squeezes", "torch's attention", "experts in one product", "a recurrent layer", "a mark",
)  # fmt: skip
_FRACTIONS = {"convolutions and attentions": 0.7, "a recurrent layer": 0.7, "experts in one product": 0.7}


def _loss(outputs: Any) -> Tensor:
    return loss_of([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)])


def _results(model: nn.Module, x: Tensor, *, training: bool) -> list[Tensor]:
    torch.manual_seed(1)
    if not training:
        with torch.no_grad():
            return [model(x)]
    outputs = model(x)
    _loss(outputs).backward()  # type: ignore[no-untyped-call]
    found = [each.grad for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return [outputs.detach(), *found]


_ROWS = [*((idiom, True) for idiom in IDIOMS), *((idiom, False) for idiom in _DIFFERENT)]
_REPEATED = [("torch's attention", True)]
"""The list called attentions has two such blocks."""


@pytest.mark.parametrize(("idiom", "training"), marked(_ROWS, [row for row in _ROWS if row not in _REPEATED]))
def test_half_of_the_bytes_gives_what_the_plain_model_gives(idiom: str, *, training: bool) -> None:
    torch.manual_seed(0)
    model, x = IDIOMS[idiom]().train(training), torch.randn(B, S, D)
    fraction = _FRACTIONS.get(idiom, 0.5)
    step = PlannedStep(loss=_loss) if training else None
    plan = ChunkPlan.make(model, (x,), fraction=fraction, training=training, step=step)
    planned = plan.apply(copy.deepcopy(model))
    for _ in range(2):
        expected, actual = (_results(each, x, training=training) for each in (model, planned))
        assert relative_difference(actual, expected) < 1e-4
    measured = training_peak_bytes if training else forward_peak_bytes
    assert measured(planned, (x,)) == plan.predicted_peak_bytes <= plan.unchunked_peak_bytes * fraction


def test_padding_that_is_left_out_is_refused() -> None:
    with pytest.raises(StrategyError) as caught:
        ChunkPlan.make(_Encoder().eval(), (torch.randn(B, S, D),))
    assert str(caught.value) == (
        "chunk.budget: 'encoder' leaves padding out in a path of nested tensors, which has no shapes to plan "
        "with; make it with enable_nested_tensor=False"
    )


def test_state_of_an_opaque_part_is_that_of_the_plain_model() -> None:
    model, x = _Stack(_Counts), torch.randn(B, S, D)
    plan = ChunkPlan.make(model, (x,), fraction=0.5)
    planned = plan.apply(copy.deepcopy(model))
    for _ in range(3):
        _results(planned, x, training=True)
    assert [layer.part.calls for layer in planned.layers] == [3, 3]  # type: ignore[union-attr]
    assert list(plan.opaque) == ["layers.0.part", "layers.1.part"]
    assert plan.to_dict()["opaque"] == dict(plan.opaque)


def test_a_mask_that_is_not_needed_is_not_made() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=D, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 32, (1, 64))
    plan = ChunkPlan.make(model, (), kwargs={"input_ids": tokens, "return_dict": False})
    planned = plan.apply(copy.deepcopy(model))

    plain, chunked = _ByKeyword(model), _ByKeyword(planned)
    assert forward_peak_bytes(plain, (tokens,)) == plan.unchunked_peak_bytes
    assert forward_peak_bytes(chunked, (tokens,)) == plan.predicted_peak_bytes
    with torch.no_grad():
        torch.testing.assert_close(chunked(tokens), plain(tokens), rtol=1e-5, atol=1e-6)


def test_hidden_states_are_those_of_the_plain_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=D, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 32, (1, 64))
    given = {"input_ids": tokens, "output_hidden_states": True}
    with torch.no_grad():
        expected = model(**given).hidden_states  # it has hooks from now on
        planned = ChunkPlan.make(model, (), kwargs=given, fraction=0.9).apply(copy.deepcopy(model))
        torch.testing.assert_close(planned(**given).hidden_states, expected, rtol=1e-5, atol=1e-6)
