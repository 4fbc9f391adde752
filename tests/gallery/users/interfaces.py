"""Blocks that are called and answer in unusual ways."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.gallery.parts import (
    WIDTH,
    Chain,
    Example,
    Layer,
    example,
    linear,
)


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = linear()

    def forward(self, x: Any, *, mask: Any = None, scale: Any = 1.0, **_: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return x + self.out(scores.softmax(-1) @ v)


class KeywordModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(KeywordBlock() for _ in range(3)))

    def forward(self, x: Any, padding: Any) -> Any:  # type: ignore[override]  # it takes more
        for i, block in enumerate(self.blocks):
            x = block(x=x, mask=padding[:, None, :], scale=1 / (i + 1), note="layer")
        return x


def keywords_only() -> Example:
    """Everything goes to the blocks by keyword, with an unused one and a mask of booleans; recomputation
    gets the same keywords."""
    padding = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    return KeywordModel(), (torch.randn(2, 4, WIDTH), padding), lambda y: y.square().mean()


class DictBlock(Layer):
    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def forward(self, batch: Any) -> Any:
        other = {"user": "item", "item": "user"}[self.key]
        mixed = torch.tanh(self.linear(batch[self.key])) + batch[other]
        return {**batch, self.key: mixed, "depth": batch["depth"] + 1}


class DictModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(DictBlock(k) for k in ("user", "item", "user", "item")))

    def forward(self, batch: Any) -> Any:
        batch = {**batch, "depth": 0}
        for block in self.blocks:
            batch = block(batch)
        return {"score": (batch["user"] * batch["item"]).sum(-1), "depth": batch["depth"]}


def dict_in_dict_out() -> Example:
    """A dict with tensors and a number goes through every block, which returns a new dict and changes
    none."""
    example = {"user": torch.randn(5, WIDTH), "item": torch.randn(5, WIDTH)}
    return DictModel(), (example,), lambda y: functional.softplus(-y["score"]).mean() / y["depth"]


@dataclasses.dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    edges: torch.Tensor
    senders: torch.Tensor
    receivers: torch.Tensor


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(3 * WIDTH, WIDTH)
        self.node = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, g: Any) -> Any:
        e = torch.cat([g.edges, g.nodes[g.senders], g.nodes[g.receivers]], -1)
        e = g.edges + functional.silu(self.edge(e))
        inbox = torch.zeros_like(g.nodes).index_add(0, g.receivers, e)
        n = g.nodes + functional.silu(self.node(torch.cat([g.nodes, inbox], -1)))
        return dataclasses.replace(g, nodes=n, edges=e)


class GraphNet(Chain):
    def __init__(self) -> None:
        super().__init__(*(MessagePassing() for _ in range(3)))
        self.read = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:  # type: ignore[override]  # it takes more
        g = Graph(nodes, edges, senders, receivers)
        for block in self.blocks:
            g = block(g)
        return self.read(g.nodes).sum()


def dataclass_blocks() -> Example:
    """Blocks of a graph network take and return a frozen dataclass; nothing in them depends on more than
    their input."""
    s, r = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 2, 3, 4, 4])
    return GraphNet(), (torch.randn(5, WIDTH), torch.randn(5, WIDTH), s, r), lambda y: y.square()


class Encoded(NamedTuple):
    """What blocks hand on; nobody reads the last field."""

    hidden: Any
    skip: Any
    unused: Any


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.b = linear()
        self.never_read = linear()

    def forward(self, hidden: Any, skip: Any = None, _unused: Any = None) -> Any:
        hidden = functional.gelu(self.a(hidden))
        skip = self.b(hidden) if skip is None else skip + self.b(hidden)
        return Encoded(hidden, skip, self.never_read(hidden))


class TupleModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(TupleBlock() for _ in range(3)))

    def forward(self, x: Any) -> Any:
        out = Encoded(x, None, None)
        for block in self.blocks:
            out = block(*out)
        return out


def namedtuple_with_unread_field() -> Example:
    """Blocks return a namedtuple with a field that nobody reads, so some parameters never get a gradient,
    in both models alike."""
    return TupleModel(), (torch.randn(6, WIDTH),), lambda y: (y.hidden * y.skip).mean()


class ModelOutput(collections.OrderedDict[str, Any]):
    """Answers to names and to attributes, as in many libraries."""

    __getattr__ = collections.OrderedDict.__getitem__


class Encoder(Chain):
    def __init__(self) -> None:
        super().__init__(*(linear() for _ in range(4)))

    def forward(self, x: Any) -> Any:
        states = [x]
        for block in self.blocks:
            states.append(torch.sigmoid(block(states[-1])))
        return ModelOutput(last=states[-1], states=states, pooled=None)


def attribute_dict_with_all_states() -> Example:
    """The model returns an OrderedDict that answers to attributes, with a list of all hidden states that
    the loss reads."""

    def loss(out: Any) -> Any:
        return out.last.mean() + sum(s.var() for s in out.states[1:])

    return Encoder(), (torch.randn(6, WIDTH),), loss


class AnyDtype(Layer):
    """Casts whatever it is called with; people override __call__ for this."""

    def __call__(self, x: Any, *args: Any) -> Any:
        x = x.to(self.linear.weight.dtype)
        return super().__call__(x, *args) + x

    def forward(self, x: Any, power: Any) -> Any:  # type: ignore[override]  # it takes more
        return torch.tanh(self.linear(x)) ** power


class CallModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(AnyDtype() for _ in range(3)))

    def forward(self, x: Any, power: Any, mode: Any) -> Any:  # type: ignore[override]  # it takes more
        for block in self.blocks:
            x = block(x, power)
        return x if mode == "full" else x[:, 0]


def call_override_with_python_inputs() -> Example:
    """Blocks override __call__ to cast their input, and the model takes an integer tensor, a number and a
    string."""
    return example(CallModel(), torch.randint(0, 5, (4, WIDTH)), 2, "first", loss=torch.mean)


class Latents(nn.Module):
    """A decoder of its own latents: it takes no input at all."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, WIDTH))
        self.blocks = nn.Sequential(*(nn.Sequential(linear(), nn.SiLU()) for _ in range(4)))
        self.register_buffer("target", torch.randn(4, WIDTH))

    def forward(self) -> Any:
        return self.blocks(self.codes) - self.target


def no_inputs() -> Example:
    """The model decodes a parameter and takes no inputs at all; the blocks are a Sequential that is called
    as one."""
    return Latents(), (), lambda y: y.abs().mean()


class OptionalBlock(Layer):
    def __init__(self, last: Any) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Any, memory: Any) -> Any:  # type: ignore[override]  # it takes more
        y = x + torch.relu(self.linear(x if memory is None else x + memory))
        return (y, None, "done") if self.last else (y, y.mean(0), "more")


class OptionalModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(OptionalBlock(i == 3) for i in range(4)))

    def forward(self, x: Any) -> Any:
        memory = None
        for block in self.blocks:
            x, memory, flag = block(x, memory)
        assert memory is None
        assert flag == "done"
        return x


def none_and_strings_between_blocks() -> Example:
    """Blocks hand on None and strings beside tensors; they are values, not state."""
    return example(OptionalModel(), torch.randn(4, WIDTH))


class Optioned(Layer):
    def forward(self, x: Any, options: Any = None) -> Any:
        return x + self.linear(x * options["gain"]).tanh()


class Options(Chain):
    def __init__(self) -> None:
        super().__init__(Optioned(), Optioned())

    def forward(self, x: Any) -> Any:
        for place, block in enumerate(self.blocks):
            x = block(x, options={"gain": 1.0 + place})
        return x


def options_made_for_each_block() -> Example:
    """The model makes a dictionary of options for each call."""
    return example(Options())


class Residual(Layer):
    def forward(self, x: Any, first: Any) -> Any:  # type: ignore[override]  # it takes more
        return x + (self.linear(x) * first).tanh()


class ValueResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = linear()
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x: Any) -> Any:
        first = self.value(x)
        for block in self.blocks:
            x = block(x, first)
        return x


def value_residual_as_an_argument() -> Example:
    """All blocks get a value of the first layer as an argument."""
    return example(ValueResidual())
