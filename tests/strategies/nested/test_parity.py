"""What a forward may do around its regions: parity bit for bit with the plain model, dropout included."""

from __future__ import annotations

import math
import random
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.strategies.nested.examination import ROWS, WIDTH, Case, rows


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


Point = namedtuple("Point", "x y")  # noqa: PYI024 (the other way to make one)


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.linear(pair.left), pair.right)


class Rotated(nn.Module):
    """Takes a pair of tensors and keywords, returns a structure with nothing in it that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], *, scale: Tensor | None = None
    ) -> dict[str, Any]:
        cos, sin = rotary
        hidden = self.linear(x) * cos + x * sin
        return {"hidden": hidden if scale is None else hidden * scale, "weights": (None, hidden.sum())}


class OfSize(nn.Module):
    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        return x * size.numel()


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient * 3


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Careful(nn.Module):
    """Checkpoints by itself."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inside, x, use_reentrant=self.use_reentrant)

    def inside(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x).sin(), 0.3)


class Lucky(nn.Module):
    """Draws random numbers of Python, and seeds torch."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return functional.dropout(x * random.random(), 0.5)


class Noting(nn.Module):
    """Puts what it sees into a list that it shares with its model."""

    def __init__(self, notes: list[Any]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(type(x).__name__)
        return x


class OfLists(nn.Module):
    """A normalisation whose weights wait in a list for a name: hand-made, but legal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.chain: list[Any] = [self.inner, {"again": self.inner}]

    def forward(self, x: Tensor) -> Any:
        return self.chain[1]["again"](self.chain[0](x))


def shapes(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    first, second = y.chunk(2, -1)
    largest, where = y.max(-1, keepdim=True)
    best = y.topk(2, -1)
    one, two, rest = y.split([1, 1, 2], -1)
    z = torch.cat([first, second], -1) + largest + best.values.sum() + (one * two * rest).sum()
    z = z + y.T.sum() + y.mT.sum() + y[where.squeeze(-1) % ROWS].sum() + y[:, None, ...][..., 0].sum()
    z = z + z.shape[0] * math.sqrt(z.size(-1)) + torch.arange(y.shape[-1])[None]
    return self.b(z)  # type: ignore[no-any-return]


def rows_of(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    for row in y:
        y = y + row
    p, q, r = y
    return self.b(y * p * q * r)  # type: ignore[no-any-return]


def new_tensors(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y = torch.where(y > 0, y, y * 0.5).masked_fill(y > 3, 1.0) + torch.zeros(
        WIDTH, dtype=y.dtype, device=y.device
    )
    y = y + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.as_tensor(2.0) + y.new_ones(1)
    return self.b(y + torch.einsum("ij,ij->i", y, y)[:, None])  # type: ignore[no-any-return]


def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y += 1
    y[0] = 2
    y[..., 1:].mul_(3)
    return self.b(functional.relu(y, True))  # type: ignore[no-any-return]


def in_place_outside(self: Any, x: Tensor) -> Tensor:
    y = self.b(self.a(x))
    y += 1
    y[:, 0].mul_(2)
    return y  # type: ignore[no-any-return]


def random_numbers(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y = y * torch.rand_like(y) + torch.randn(WIDTH) * torch.bernoulli(torch.full((WIDTH,), 0.5))
    return self.b(functional.dropout(y, 0.5, self.training))  # type: ignore[no-any-return]


def branches(self: Any, x: Tensor, mask: Tensor | None = None, *, again: bool = False) -> Any:
    y = self.a(x)
    if mask is not None and mask.dim() == 2 and y.is_floating_point():
        y = y.masked_fill(mask, 0.0)
    for _ in range(2 if again else 1):
        y = y * 1.5
    return self.b(y) if self.training else self.b(-y)


def rotary(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    out = self.rotated(y, (y.cos(), y.sin()), scale=y.mean())
    return self.b(out["hidden"]) + out["weights"][1], out


def recurrent(self: Any, x: Tensor) -> Any:
    y, (h, c) = self.lstm(self.a(x))
    z, _ = self.lstm(y, (h, c))
    return self.b(z) + h.sum() + c.mean()


def attention(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    mixed, weights = self.attend(y, y, y)
    return self.b(mixed) + weights.sum()


def own_linear(self: Any, x: Tensor) -> Any:
    y = functional.linear(self.a(x), self.b.weight, self.bias) + self.offset
    return self.b(y) + self.plain


def outputs(self: Any, x: Tensor) -> Any:
    y = self.b(self.a(x))
    return y, [y, None, 3], {"x": x, "shape": y.shape[0]}, Pair(y, x)


RECORDED = {
    "views, indices and scalars of shapes": Case(forward=shapes),
    "rows of a tensor, one by one": Case(forward=rows_of),
    "tensors made there": Case(forward=new_tensors),
    "changes in place inside a region": Case(forward=in_place),
    "changes in place behind a region": Case(forward=in_place_outside),
    "a running mean that is no region's": Case(
        forward=lambda self, x: self.b(self.norm(self.a(x))),
        more=lambda: {"norm": nn.BatchNorm1d(WIDTH)},
        labels={"a": 0},
    ),
    "a buffer changed in place outside": Case(
        forward=lambda self, x: self.b(self.a(x)) + self.mean.mul_(0.5).add_(x.detach().mean(0)),
        more=lambda: {"mean": torch.zeros(WIDTH)},
        labels={"a": 0},
    ),
    "random numbers": Case(forward=random_numbers),
    "a module with generators of its own": Case(
        forward=lambda self, x: functional.dropout(self.lucky(self.b(self.a(x))), 0.5),
        more=lambda: {"lucky": Lucky()},
    ),
    "an input that is there": Case(forward=branches, args=lambda: (rows(), torch.eye(ROWS, WIDTH) > 0)),
    "an input that is not there": Case(forward=branches),
    "keyword inputs": Case(
        forward=branches, kwargs=lambda: {"mask": torch.eye(ROWS, WIDTH) > 0, "again": True}
    ),
    "inputs under the names of Python and torch": Case(
        forward=lambda self, x, **kwargs: self.b(self.a(x)) + kwargs["class"] * kwargs["torch"][1]["getattr"],
        kwargs=lambda: {"class": rows(), "torch": (1, {"getattr": rows()})},
    ),
    "any number of inputs": Case(
        forward=lambda self, *xs, scale=2.0: self.b(self.a(xs[0])) * scale + xs[1] + xs[2][0],
        args=lambda: (rows(), rows(), [rows()]),
    ),
    "one input twice": Case(
        forward=lambda self, x, y: self.b(self.a(x)) * (2 if x is y else 3),
        args=lambda: (x := rows(), x),
    ),
    "no input that requires a gradient": Case(
        forward=lambda self, x: self.b(self.a(x)), args=lambda: (torch.ones(ROWS, WIDTH),)
    ),
    "one row, and half precision": Case(
        forward=lambda self, x: self.b(self.a(x).to(torch.bfloat16).float()),
        args=lambda: (torch.randn(1, WIDTH, requires_grad=True),),
    ),
    "pairs in, keywords in, structures out": Case(
        forward=rotary, more=lambda: {"rotated": Rotated()}, labels={"a": [0, 0], "rotated": [0, 1], "b": 0}
    ),
    "named tuples": Case(
        forward=lambda self, x: self.second(self.first(Pair(x, x * 2))),
        more=lambda: {"first": OfPair(), "second": OfPair()},
        labels={"first": 0, "second": 1},
    ),
    "named tuples of the older kind": Case(
        forward=lambda self, x: self.b(self.a((point := Point(x, x.sin())).x)) + point.y
    ),
    "a size that a module takes": Case(
        forward=lambda self, x: self.b(self.sized(self.a(x), x.shape)),
        more=lambda: {"sized": OfSize()},
        labels={"a": 0, "sized": 0, "b": 1},
    ),
    "every kind of output": Case(forward=outputs),
    "an output that is an input": Case(forward=lambda self, x: (x, self.b(self.a(x)))),
    "an output that is a parameter": Case(forward=lambda self, x: (self.b(self.a(x)), self.a.weight)),
    "a result that nobody uses": Case(
        forward=lambda self, x: [self.a(x), self.b(x)][1], labels={"a": 0, "b": 1}
    ),
    "a module that returns its input": Case(
        forward=lambda self, x: self.b(self.same(y := self.a(x))) + y,
        more=lambda: {"same": nn.Identity()},
        labels={"same": 0, "b": 1},
    ),
    "a module called twice": Case(forward=lambda self, x: self.b(self.a(self.a(x)) + x)),
    "a module with two names": Case(
        forward=lambda self, x: self.b(self.c(self.a(x))),
        more=lambda: {"c": (one := nn.Linear(WIDTH, WIDTH)), "d": one},
        labels={"c": 0, "b": 0},
    ),
    "parameters read inside, of a module, too": Case(
        forward=own_linear,
        more=lambda: {
            "bias": nn.Parameter(torch.ones(WIDTH)),
            "offset": torch.full((WIDTH,), 0.5),
            "plain": nn.Parameter(torch.ones(1)),
        },
    ),
    "recurrent state": Case(
        forward=recurrent,
        more=lambda: {"lstm": nn.LSTM(WIDTH, WIDTH, batch_first=True)},
        args=lambda: (torch.randn(2, 5, WIDTH, requires_grad=True),),
        labels={"a": 0, "lstm": 0, "b": 1},
    ),
    "one tensor three times": Case(
        forward=attention,
        more=lambda: {"attend": nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)},
        args=lambda: (torch.randn(2, 5, WIDTH, requires_grad=True),),
        labels={"a": 0, "attend": 1, "b": 1},
    ),
    "torch's encoder": Case(
        forward=lambda self, x: self.b(self.encoder(self.a(x))),
        more=lambda: {
            "encoder": nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 3, enable_nested_tensor=False
            )
        },
        args=lambda: (torch.randn(2, 5, WIDTH, requires_grad=True),),
        labels={"encoder.layers.0": [0, 0], "encoder.layers.1": [0, 1], "encoder.layers.2.linear1": 1},
    ),
    "a parametrised module": Case(
        forward=lambda self, x: self.b(self.normed(self.a(x))),
        more=lambda: {"normed": parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))},
        labels={"a": 0, "normed": 0},
    ),
    "its parameter": Case(
        forward=lambda self, x: self.b(functional.linear(self.a(x), self.normed.weight)),
        more=lambda: {"normed": parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))},
        labels={"a": 0, "normed.parametrizations.weight": 0, "b": 0},
    ),
    "modules in containers of both kinds": Case(
        forward=lambda self, x: self.b(self.lists(self.a(x))),
        more=lambda: {"lists": OfLists()},
        labels={"a": 0, "lists.inner": 0, "b": 1},
    ),
    "a dictionary of modules": Case(
        forward=lambda self, x: self.b(sum(m(x) * len(name) for name, m in self.by_name.items())),
        more=lambda: {
            "by_name": nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH), "three": nn.Linear(WIDTH, WIDTH)})
        },
        labels={"by_name.one": 0, "by_name.three": [0, 0]},
    ),
    "submodules under the names of a graph": Case(
        forward=lambda self, x: self.b(
            self.owner(self.meta(self.graph(self.code(self.checkpoint_0(self.a(x))))))
        ),
        more=lambda: {
            name: nn.Linear(WIDTH, WIDTH) for name in ("owner", "meta", "graph", "code", "checkpoint_0")
        },
        labels={"a": 0, "checkpoint_0": 0, "code": 0, "graph": [0, 0], "meta": 1},
    ),
    "a function of autograd, in a module": Case(
        forward=lambda self, x: self.b(self.doubling(self.a(x))),
        more=lambda: {"doubling": Doubling()},
        labels={"a": 0, "doubling": 0, "b": 1},
    ),
    "a checkpoint inside a region": Case(
        forward=lambda self, x: self.b(self.careful(self.a(x))),
        more=lambda: {"careful": Careful(use_reentrant=False)},
        labels={"a": [0, 0], "careful": 0, "b": 0},
    ),
    "a reentrant checkpoint inside a region": Case(
        forward=lambda self, x: self.b(self.careful(self.a(x))),
        more=lambda: {"careful": Careful(use_reentrant=True)},
        labels={"a": [0, 0], "careful": 0, "b": 0},
    ),
    "a gradient taken in forward": Case(
        forward=lambda self, x: self.b(torch.autograd.grad(self.a(x).sin().sum(), x, create_graph=True)[0])
    ),
}


@pytest.mark.parametrize("case", RECORDED.values(), ids=RECORDED)
def test_parity(case: Case) -> None:
    assert case.differences() == []


def test_what_a_shadow_notes_does_not_reach_the_model() -> None:
    notes: list[Any] = []
    case = Case(
        forward=lambda self, x: self.b(self.noting(self.a(x))),
        more=lambda: {"noting": Noting(notes), "notes": notes},
        labels={"noting": 0},
    )
    assert case.differences(steps=1) == []
    assert notes == ["Tensor"]  # one by the plain model; the other model has a copy of the list
