"""Right models whose blocks are called and answer in unusual ways."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import dataclasses
from collections import OrderedDict, namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F

D = 8


class KeywordBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x, *, mask=None, scale=1.0, **unused):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return x + self.out(scores.softmax(-1) @ v)


class KeywordModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(3))

    def forward(self, x, padding):
        for i, block in enumerate(self.blocks):
            x = block(x=x, mask=padding[:, None, :], scale=1 / (i + 1), note="layer")
        return x


def keywords_only():
    padding = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    return KeywordModel(), (torch.randn(2, 4, D), padding), lambda y: y.square().mean()


class DictBlock(nn.Module):
    def __init__(self, key):
        super().__init__()
        self.key = key
        self.lin = nn.Linear(D, D)

    def forward(self, batch):
        other = {"user": "item", "item": "user"}[self.key]
        mixed = torch.tanh(self.lin(batch[self.key])) + batch[other]
        return {**batch, self.key: mixed, "depth": batch["depth"] + 1}


class DictModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DictBlock(k) for k in ("user", "item", "user", "item"))

    def forward(self, batch):
        batch = {**batch, "depth": 0}
        for block in self.blocks:
            batch = block(batch)
        return {"score": (batch["user"] * batch["item"]).sum(-1), "depth": batch["depth"]}


def dict_in_dict_out():
    example = {"user": torch.randn(5, D), "item": torch.randn(5, D)}
    return DictModel(), (example,), lambda y: F.softplus(-y["score"]).mean() / y["depth"]


@dataclasses.dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    edges: torch.Tensor
    senders: torch.Tensor
    receivers: torch.Tensor


class MessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge = nn.Linear(3 * D, D)
        self.node = nn.Linear(2 * D, D)

    def forward(self, g):
        e = torch.cat([g.edges, g.nodes[g.senders], g.nodes[g.receivers]], -1)
        e = g.edges + F.silu(self.edge(e))
        inbox = torch.zeros_like(g.nodes).index_add(0, g.receivers, e)
        n = g.nodes + F.silu(self.node(torch.cat([g.nodes, inbox], -1)))
        return dataclasses.replace(g, nodes=n, edges=e)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MessagePassing() for _ in range(3))
        self.read = nn.Linear(D, 1)

    def forward(self, nodes, edges, senders, receivers):
        g = Graph(nodes, edges, senders, receivers)
        for block in self.blocks:
            g = block(g)
        return self.read(g.nodes).sum()


def dataclass_blocks():
    s, r = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 2, 3, 4, 4])
    return GraphNet(), (torch.randn(5, D), torch.randn(5, D), s, r), lambda y: y.square()


Encoded = namedtuple("Encoded", "hidden skip unused")


class TupleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.Linear(D, D)
        self.never_read = nn.Linear(D, D)

    def forward(self, hidden, skip=None, unused=None):
        hidden = F.gelu(self.a(hidden))
        skip = self.b(hidden) if skip is None else skip + self.b(hidden)
        return Encoded(hidden, skip, self.never_read(hidden))


class TupleModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(3))

    def forward(self, x):
        out = Encoded(x, None, None)
        for block in self.blocks:
            out = block(*out)
        return out


def namedtuple_with_unread_field():
    return TupleModel(), (torch.randn(6, D),), lambda y: (y.hidden * y.skip).mean()


class ModelOutput(OrderedDict):
    """Answers to names and to attributes, as in many libraries."""

    __getattr__ = OrderedDict.__getitem__


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        states = [x]
        for block in self.blocks:
            states.append(torch.sigmoid(block(states[-1])))
        return ModelOutput(last=states[-1], states=states, pooled=None)


def attribute_dict_with_all_states():
    def loss(out):
        return out.last.mean() + sum(s.var() for s in out.states[1:])

    return Encoder(), (torch.randn(6, D),), loss


class AnyDtype(nn.Module):
    """Casts whatever it is called with; people override __call__ for this."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def __call__(self, x, *args):
        x = x.to(self.lin.weight.dtype)
        return super().__call__(x, *args) + x

    def forward(self, x, power):
        return torch.tanh(self.lin(x)) ** power


class CallModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AnyDtype() for _ in range(3))

    def forward(self, x, power, mode):
        for block in self.blocks:
            x = block(x, power)
        return x if mode == "full" else x[:, 0]


def call_override_with_python_inputs():
    return CallModel(), (torch.randint(0, 5, (4, D)), 2, "first"), lambda y: y.mean()


class Latents(nn.Module):
    """A decoder of its own latents: it takes no input at all."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, D))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.SiLU()) for _ in range(4)))
        self.register_buffer("target", torch.randn(4, D))

    def forward(self):
        return self.blocks(self.codes) - self.target


def no_inputs():
    return Latents(), (), lambda y: y.abs().mean()


class OptionalBlock(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.last = last
        self.lin = nn.Linear(D, D)

    def forward(self, x, memory):
        y = x + torch.relu(self.lin(x if memory is None else x + memory))
        return (y, None, "done") if self.last else (y, y.mean(0), "more")


class OptionalModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(OptionalBlock(i == 3) for i in range(4))

    def forward(self, x):
        memory = None
        for block in self.blocks:
            x, memory, flag = block(x, memory)
        assert memory is None and flag == "done"
        return x


def none_and_strings_between_blocks():
    return OptionalModel(), (torch.randn(4, D),), lambda y: y.square().mean()
