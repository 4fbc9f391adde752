"""Small models that do what real ones do and sharding easily gets wrong.

Shapes: B batch 4, S sequence 8, D width 16, F hidden 32. Linears called `up` are split by column,
those called `down` by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from strategies.shard.model.graph import TensorAxis

B, S, D, F = 4, 8, 16, 32
SPLITS = {
    f"{prefix}{name}": style
    for prefix in ("", "*.", "*.*.")
    for name, style in (("up", "column"), ("up.?", "column"), ("gate", "column"), ("down", "row"))
}
KEPT: list[Tensor] = []
"""What `Keeps` puts outside of the model."""


def axis(ranks: int) -> TensorAxis:
    return TensorAxis(ranks=ranks, splits=SPLITS)


def inputs() -> Tensor:
    return torch.randn(B, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Pair(nn.Module):
    """Up, something in between, down, added to the input; then a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, F)
        self.down = nn.Linear(F, D)
        self.head = nn.Linear(D, 12)

    def between(self, h: Tensor) -> Tensor:
        return functional.gelu(h)

    def forward(self, x: Tensor) -> Any:
        return self.head(x + self.down(self.between(self.up(self.norm(x)))))


def pair(between: Callable[[Tensor], Tensor]) -> type[Pair]:
    return type("Pair", (Pair,), {"between": lambda _self, h: between(h)})


def _branched(h: Tensor) -> Tensor:
    return h.relu() if h.shape[0] > 2 else h.sigmoid()


def _normalised(h: Tensor) -> Tensor:
    h.mul_(2)
    h += 1
    return functional.relu(h, inplace=True)


def _masked(h: Tensor) -> Tensor:
    mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
    scores = h @ h.transpose(1, 2) / math.sqrt(h.shape[-1])
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ h


def _as_strided(h: Tensor) -> Tensor:
    return h.contiguous().as_strided((B, S // 2, F), (h.stride(0), 2 * h.stride(1), 1)).repeat(1, 2, 1)


def _looped(h: Tensor) -> Tensor:
    return torch.stack([row / (1 + at) for at, row in enumerate(h)])


def _checked(h: Tensor) -> Tensor:
    if h.shape[0] != B:
        raise ValueError("another batch")
    return h.relu()


class Heads(nn.Module):
    """Attention with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.up = nn.ModuleDict({name: nn.Linear(D, width) for name, width in (("q", F), ("k", D), ("v", D))})
        self.down = nn.Linear(F, D, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, 4).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (self.heads(linear(normed)) for linear in self.up.values())
        attended = self.attend(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1)
        output: Tensor = x + self.down(attended)
        return output


class RepeatedHeads(Heads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, rows, width = k.shape
        k, v = (
            each[:, :, None].expand(batch, heads, 2, rows, width).reshape(batch, 2 * heads, rows, width)
            for each in (k, v)
        )
        weights: Tensor = (q @ k.transpose(2, 3) / math.sqrt(width)).softmax(-1)
        attended: Tensor = weights @ v
        return attended


class FixedHeads(Heads):
    """Knows how many heads there are."""

    def heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (x.shape[-1] // 4, 4))
        return split.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) / q.shape[1]


class ScaledLinear(nn.Linear):
    """Divides its weight by the largest row."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the parent's name)
        return functional.linear(input, self.weight / self.weight.norm(dim=1).max(), self.bias)


class CallsParent(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the parent's name)
        return super().forward(input) * 2


class MoreParameters(nn.Linear):
    def __init__(self, width: int, features: int) -> None:
        super().__init__(width, features)
        self.scale = nn.Parameter(torch.ones(features) * 1.5)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the parent's name)
        return super().forward(input) * self.scale


class OwnInit(nn.Linear):
    """A linear for all that matters."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)
        nn.init.normal_(self.bias)


class CountingEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the parent's name)
        return super().forward(input) / input.numel()


class OwnNorm(nn.Module):
    """As `transformers` writes an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D) + torch.arange(D) / D)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x * scale).to(x.dtype)


class BatchMean(nn.LayerNorm):
    """Normalises, and takes away the mean of the batch."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the parent's name)
        normed: Tensor = super().forward(input)
        return normed - normed.mean(0)


def with_linear(cls: Callable[..., nn.Module], name: str = "up", base: type[Pair] = Pair) -> type[Pair]:
    class With(base):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            linear = getattr(self, name)
            setattr(self, name, cls(linear.in_features, linear.out_features))

    return With


def with_norm(cls: Callable[[], nn.Module]) -> type[Pair]:
    class With(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.norm = cls()  # type: ignore[assignment]

    return With


def changed(change: Callable[[Any], object], base: type[nn.Module] = Pair) -> type[nn.Module]:
    """Return the model to which something was done after it was built."""

    class Changed(base):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            change(self)

    return Changed


def _halved(_module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    return args[0] / args[0].shape[0]


def _summed(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output - output.mean()


def _scaled_gradient(_module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    scale = 1 + grad_output[0].abs().sum()
    return tuple(None if each is None else each / scale for each in grad_input)


def _with_gradient_hook(model: Pair) -> None:
    model.up.weight.register_hook(lambda gradient: gradient / gradient.norm())


class Two(nn.Module):
    """Two blocks."""

    block: type[Pair] = Pair

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Residual() for _ in range(2))
        self.head = nn.Linear(D, 12)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.gate = nn.Linear(D, F)
        self.up = nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        output: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return output


class Shared(Two):
    """The second block is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


class SharedLinear(Two):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = self.blocks[0].up


class TiedWeights(Two):
    def __init__(self) -> None:
        super().__init__()
        first, second = self.blocks
        assert isinstance(first, _Residual)
        assert isinstance(second, _Residual)
        second.up.weight = first.up.weight
        second.norm.bias = first.norm.bias


class TiedEmbedding(nn.Module):
    """Reads words from the signs of its input; the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, D, padding_idx=3)
        self.up = nn.Linear(D, F)
        self.down = nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x > 0).sum(-1)
        h = self.embedding(tokens)
        h = h + self.down(self.up(h).relu())
        return functional.linear(h, self.embedding.weight)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = CountingEmbedding(20, D)
        self.position = nn.Parameter(torch.randn(S, D))
        self.up = nn.Linear(D, F)
        self.down = nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x > 0).sum(-1)) + self.position[: x.shape[1]]
        output: Tensor = self.down(self.up(h).relu())
        return output


class FunctionalWeight(Pair):
    """Uses the weight of a linear twice, once without calling it."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(self.norm(x))
        back = functional.linear(h, self.up.weight.T)
        return self.head(x + back + self.down(h))


class DirectForward(Pair):
    def forward(self, x: Tensor) -> Any:
        h = self.up(self.norm(x)).relu() + self.up.forward(x)
        return self.head(x + self.down(h))


class Penalised(Pair):
    """Returns a penalty of its weights, too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up.weight.square().sum() + self.norm.weight.abs().sum()


class KeywordCalls(Pair):
    def forward(self, x: Tensor) -> Any:
        h = self.down(input=functional.gelu(input=self.up(input=self.norm(input=x))))
        return self.head(input=torch.add(input=x, other=h))


class Merged(Pair):
    """Works on all words at once."""

    def forward(self, x: Tensor) -> Any:
        flat = self.norm(x).reshape(-1, D)
        h = self.down(self.up(flat).relu())
        return self.head(x + h.view(x.shape[0], x.shape[1], -1))


class Swapped(Pair):
    """Works on the sequence before the batch, on tensors that are not contiguous."""

    def forward(self, x: Tensor) -> Any:
        x = x.transpose(0, 1)
        h = self.down(self.between(self.up(self.norm(x)))).permute(1, 0, 2)
        return self.head(x.transpose(0, 1) + h[..., ::1]), h.transpose(1, 2)[:, ::2]


class Outputs(Pair):
    """Returns tensors and numbers."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(self.norm(x))
        return {"logits": self.head(x + self.down(h)), "hidden": h, "mean": h.mean(), "parts": h.chunk(2, -1)}


class Sizes(Pair):
    """Returns a number that follows from a size."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(self.norm(x))
        return self.head(x + self.down(h)), math.prod(h.shape)


class Buffers(Pair):
    """Counts, and adds up what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(F))
        self.statistics = nn.BatchNorm1d(S)

    def between(self, h: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(h.detach().mean((0, 1)))
        mixed: Tensor = self.statistics(h.relu())
        return mixed + self.seen


class Drops(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(super().forward(x))


class ClassToken(Pair):
    """Puts a learned word in front."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x: Tensor) -> Any:
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x[:, 1:]), dim=1)
        return super().forward(x)[:, 0]


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class LayerScale(Pair):
    """Learned scales, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scaled(D)

    def forward(self, x: Tensor) -> Any:
        h = self.scale(self.down(self.between(self.up(self.norm(self.scale(x))))))
        return self.head(x + h)


class Recurrent(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        h, (last, _) = self.rnn(x)
        return super().forward(h) + last.sum()


class Convolved(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(S, S, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.mix(x))


class Encoder(nn.Module):
    """A layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 2, F, dropout=0.0, batch_first=True)
        self.up = nn.Linear(D, F)
        self.down = nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(self.layer(x)).relu())
        return output


class Frozen(Two):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("blocks.1" in name)


class Keeps(Pair):
    def between(self, h: Tensor) -> Tensor:
        KEPT.append(h)
        return h.relu()


class Inserted(Pair):
    """Writes into a tensor that it makes."""

    def between(self, h: Tensor) -> Tensor:
        made = torch.zeros_like(h)
        made[:, ::2] = h[:, 1::2] * 2
        made[0] += 1
        return made.relu()


class Experts(Pair):
    """Weighs two feed-forwards by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 2, bias=False)
        self.experts = nn.ModuleList(_Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        weights = self.router(x).softmax(-1)
        mixed = sum(weights[..., at, None] * expert(x) for at, expert in enumerate(self.experts))
        return self.head(mixed), weights.mean((0, 1))


class Sequenced(nn.Sequential):
    def __init__(self) -> None:
        up, down = nn.Linear(D, F), nn.Linear(F, D)
        super().__init__(nn.LayerNorm(D), up, nn.GELU(), down)
        self.add_module("last", nn.Sequential(nn.Flatten(1), nn.Linear(S * D, 6)))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": Pair,
    "two blocks": Two,
    "divides by the batch": pair(lambda h: h.relu() / h.shape[0]),
    "divides by the sequence": pair(lambda h: h * (1 / h.size(1))),
    "divides by its length": pair(lambda h: h / len(h)),
    "divides by features": pair(lambda h: h / h.shape[-1] ** 0.5),
    "divides by elements": pair(lambda h: h / h.numel()),
    "branches over a size": pair(_branched),
    "loops over the batch": pair(_looped),
    "checks a size": pair(_checked),
    "makes a mask": pair(_masked),
    "adds positions": pair(lambda h: h + torch.arange(h.shape[1])[:, None]),
    "adds new zeros": pair(lambda h: h + h.new_zeros(h.shape[0], 1, 1) + h.new_ones(h.shape)),
    "views to numbers": pair(lambda h: h.relu().view(B, S, F)),
    "views to sizes": pair(lambda h: h.relu().view(h.shape[0] * h.shape[1], -1).view(h.shape)),
    "views with strides": pair(_as_strided),
    "changes in place": pair(_normalised),
    "sorts": pair(lambda h: torch.sort(h, dim=-1).values),
    "splits features": pair(lambda h: torch.cat([part.relu() for part in h.chunk(2, -1)], -1)),
    "turns features": pair(lambda h: torch.roll(h, 1, -1)),
    "normalises over the batch": pair(lambda h: (h - h.mean(0)) / (1 + h.var(0))),
    "softmax over features": pair(lambda h: h.softmax(-1)),
    "softmax over the sequence": pair(lambda h: h.softmax(1)),
    "unbinds and stacks": pair(lambda h: torch.stack(h.unbind(1)[::-1], dim=1)),
    "einsum": pair(lambda h: torch.einsum("bsf,btf->bsf", h, h.relu())),
    "where": pair(lambda h: torch.where(h > 0, h, h.exp() - 1)),
    "heads": Heads,
    "repeated heads": RepeatedHeads,
    "heads by number": FixedHeads,
    "linear with another forward": with_linear(ScaledLinear),
    "linear that calls its parent": with_linear(CallsParent),
    "row linear that calls its parent": with_linear(CallsParent, "down"),
    "linear with a further parameter": with_linear(MoreParameters),
    "linear with another initialisation": with_linear(OwnInit),
    "head with another forward": with_linear(ScaledLinear, "head"),
    "weight norm": changed(lambda m: parametrizations.weight_norm(m.up)),
    "orthogonal head": changed(lambda m: parametrizations.orthogonal(m.head)),
    "spectral norm": changed(lambda m: parametrizations.spectral_norm(m.down)),
    "own norm": with_norm(OwnNorm),
    "norm of the batch": with_norm(lambda: BatchMean(D)),
    "group norm": with_norm(lambda: nn.GroupNorm(2, S)),
    "hook before a linear": changed(lambda m: m.up.register_forward_pre_hook(_halved)),
    "hook after a linear": changed(lambda m: m.head.register_forward_hook(_summed)),
    "hook after a norm": changed(lambda m: m.norm.register_forward_hook(_summed)),
    "hook behind a gradient": changed(lambda m: m.head.register_full_backward_hook(_scaled_gradient)),
    "hook after a block": changed(lambda m: m.blocks[0].register_forward_hook(_summed), Two),
    "hook before a block": changed(lambda m: m.blocks[1].register_forward_pre_hook(_halved), Two),
    "gradient hook of a block": changed(
        lambda m: m.blocks[1].register_full_backward_hook(_scaled_gradient), Two
    ),
    "hook after the model": changed(lambda m: m.register_forward_hook(_summed), Two),
    "hook of a parameter": changed(_with_gradient_hook),
    "shared block": Shared,
    "shared linear": SharedLinear,
    "tied weights": TiedWeights,
    "tied embedding": TiedEmbedding,
    "words": Words,
    "weight in a function": FunctionalWeight,
    "forward without a call": DirectForward,
    "penalty of weights": Penalised,
    "keyword calls": KeywordCalls,
    "batch and sequence as one": Merged,
    "sequence first": Swapped,
    "several outputs": Outputs,
    "returns a size": Sizes,
    "buffers": Buffers,
    "dropout at the end": Drops,
    "learned word": ClassToken,
    "learned scale": LayerScale,
    "recurrent": Recurrent,
    "convolution": Convolved,
    "layer of torch": Encoder,
    "frozen block": Frozen,
    "keeps a tensor": Keeps,
    "writes into a tensor": Inserted,
    "weighted experts": Experts,
    "sequential": Sequenced,
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double().train()
