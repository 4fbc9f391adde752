"""Right models whose blocks are shared, renamed, wrapped, skipped or called more than once."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import copy
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

D = 8


class Mlp(nn.Module):
    def __init__(self, width=D):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OutOfOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"decode": Mlp(), "encode": Mlp(), "latent": Mlp()})

    def forward(self, x):
        for name in ("encode", "latent", "decode"):
            x = self.blocks[name](x)
        return x


def module_dict_out_of_order():
    return OutOfOrder(), (torch.randn(3, D),), lambda y: y.square().mean()


class Albert(nn.Module):
    def __init__(self):
        super().__init__()
        shared = Mlp()
        self.blocks = nn.ModuleList([shared, Mlp(), shared, shared])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def one_block_in_three_places():
    return Albert(), (torch.randn(3, D),), lambda y: y.square().mean()


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, left, right):
        for block in self.blocks:
            left, right = block(left), block(right.detach()) + right
        return left, right


def siamese_calls_twice():
    return Siamese(), (torch.randn(3, D), torch.randn(2, D)), lambda y: y[0].mean() - y[1].square().mean()


class TiedLm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(D, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_weights_across_blocks():
    tokens = torch.randint(0, 11, (2, 6))
    return TiedLm(), (tokens,), lambda y: F.cross_entropy(y[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.confidence = nn.Linear(D, 1)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i == 1:
                continue  # distilled away, kept for old files of weights
            x = block(x)
            if i == 2 and torch.sigmoid(self.confidence(x)).mean() > 0.0:
                break
        return x * torch.sigmoid(self.confidence(x))


def skipped_and_early_exit():
    return EarlyExit(), (torch.randn(3, D),), lambda y: y.square().mean()


class Pair(nn.Sequential):
    """A Sequential that passes more than one tensor."""

    def forward(self, x, shift):
        for inner in self:
            x = inner(x) + shift
        return x


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.stages = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "main": nn.ModuleList(
                            Pair(Mlp(), nn.Sequential(nn.Linear(D, D), nn.Tanh())) for _ in range(3)
                        )
                    }
                )
            ]
        )

    def forward(self, x):
        for i, block in enumerate(self.body.stages[0]["main"]):
            x = block(x, torch.full((), 0.1 * i))
        return x


def nested_container_path():
    return Nested(), (torch.randn(3, D),), lambda y: y.square().mean()


class Teacher(nn.Module):
    """A frozen deep copy gives targets and an auxiliary loss."""

    def __init__(self):
        super().__init__()
        proto = Mlp()
        self.blocks = nn.ModuleList(copy.deepcopy(proto) for _ in range(3))
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.lock = threading.Lock()  # neither copied nor pickled
        self.act = lambda x: x * 0.5

    def forward(self, x):
        with self.lock, torch.inference_mode():
            y = x
            for block in self.teacher:
                y = block(y)
        aux = 0.0
        for block in self.blocks:
            x = self.act(block(x))
            aux = aux + F.mse_loss(x, y.clone())
        return x, aux


def deepcopied_teacher_with_lock():
    return Teacher(), (torch.randn(3, D),), lambda y: y[0].mean() + 0.1 * y[1]


class Delegate(nn.Module):
    """Passes unknown attributes on to what it wraps."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Delegate(Mlp()) for _ in range(3))
        self.same_blocks = self.blocks  # a second name, from a refactoring

    def forward(self, x):
        for block in self.same_blocks:
            x = block(x) * block.norm.weight
        return x


def delegating_wrappers_with_alias():
    return Wrapped(), (torch.randn(3, D),), lambda y: y.square().mean()


class FlatParameters(nn.Module):
    """All weights are views of one flat storage."""

    def __init__(self):
        super().__init__()
        flat = torch.randn(3 * D * D) / 3
        self.blocks = nn.ModuleList()
        for piece in flat.split(D * D):
            lin = nn.Linear(D, D, bias=False)
            lin.weight = nn.Parameter(piece.view(D, D))
            self.blocks.append(nn.Sequential(lin, nn.ELU()))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def parameters_in_one_storage():
    return FlatParameters(), (torch.randn(3, D),), lambda y: y.square().mean()


class Lora(nn.Module):
    def __init__(self, rank=2):
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, D) / 4)
        self.up = nn.Parameter(torch.randn(D, rank) / 4)

    def forward(self, x):
        return torch.tanh(self.base(x) + (x @ self.down.T) @ self.up.T)


class LoraModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, D).requires_grad_(False)
        self.blocks = nn.ModuleList([Lora().requires_grad_(False), Lora(), Lora(), Lora()])

    def parameters(self, recurse=True):  # "only what trains"
        return (p for p in super().parameters(recurse) if p.requires_grad)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def lora_on_frozen_base():
    return LoraModel(), (torch.randint(0, 7, (2, 5)),), lambda y: y.square().mean()
