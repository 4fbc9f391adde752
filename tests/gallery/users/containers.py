"""Blocks that are shared, renamed, wrapped, skipped or called more than once."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.gallery.parts import (
    WIDTH,
    Chain,
    Example,
    Layer,
    Net,
    example,
    linear,
)


class Mlp(nn.Module):
    def __init__(self, width: Any = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class OutOfOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"decode": Mlp(), "encode": Mlp(), "latent": Mlp()})

    def forward(self, x: Any) -> Any:
        for name in ("encode", "latent", "decode"):
            x = self.blocks[name](x)
        return x


def module_dict_out_of_order() -> Example:
    """Blocks of a ModuleDict run in another order than they were registered in."""
    return example(OutOfOrder(), torch.randn(3, WIDTH))


class Albert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Mlp()
        self.blocks = nn.ModuleList([shared, Mlp(), shared, shared])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def one_block_in_three_places() -> Example:
    """One block stands in the list three times, as in ALBERT, and its gradient is the sum of three calls."""
    return example(Albert(), torch.randn(3, WIDTH))


class Siamese(Chain):
    def __init__(self) -> None:
        super().__init__(*(Mlp() for _ in range(3)))

    def forward(self, left: Any, right: Any) -> Any:  # type: ignore[override]  # it takes more
        for block in self.blocks:
            left, right = block(left), block(right.detach()) + right
        return left, right


def siamese_calls_twice() -> Example:
    """Each block is called twice in a forward, on inputs of other sizes, once without a gradient for its
    input."""
    return (
        Siamese(),
        (torch.randn(3, WIDTH), torch.randn(2, WIDTH)),
        lambda y: y[0].mean() - y[1].square().mean(),
    )


class TiedLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        blocks = [Mlp() for _ in range(3)]
        blocks[2].up.weight = blocks[0].up.weight
        self.blocks = nn.ModuleList(blocks)
        self.head: Any = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_weights_across_blocks() -> Example:
    """Embedding and head are tied, and two blocks share one weight; ties survive whatever is done to
    activations."""
    tokens = torch.randint(0, 11, (2, 6))
    return (
        TiedLm(),
        (tokens,),
        lambda y: functional.cross_entropy(y[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()),
    )


class EarlyExit(Chain):
    def __init__(self) -> None:
        super().__init__(*(Mlp() for _ in range(4)))
        self.confidence = nn.Linear(WIDTH, 1)

    def forward(self, x: Any) -> Any:
        for i, block in enumerate(self.blocks):
            if i == 1:
                continue  # distilled away, kept for old files of weights
            x = block(x)
            if i == 2 and torch.sigmoid(self.confidence(x)).mean() > 0.0:
                break
        return x * torch.sigmoid(self.confidence(x))


def skipped_and_early_exit() -> Example:
    """One block is never called and one is left out by an early exit, so their gradients are None in both
    models."""
    return example(EarlyExit(), torch.randn(3, WIDTH))


class Pair(nn.Sequential):
    """A Sequential that passes more than one tensor."""

    def forward(self, x: Any, shift: Any) -> Any:  # type: ignore[override]  # it takes more
        for inner in self:
            x = inner(x) + shift
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = nn.Module()
        self.body.stages = nn.ModuleList(
            [
                nn.ModuleDict(
                    {"main": nn.ModuleList(Pair(Mlp(), nn.Sequential(linear(), nn.Tanh())) for _ in range(3))}
                )
            ]
        )

    def forward(self, x: Any) -> Any:
        for i, block in enumerate(self.body.stages[0]["main"]):
            x = block(x, torch.full((), 0.1 * i))
        return x


def nested_container_path() -> Example:
    """The blocks are deep inside of ModuleLists and a ModuleDict, and are Sequentials with a second
    argument."""
    return example(Nested(), torch.randn(3, WIDTH))


class Teacher(nn.Module):
    """A frozen deep copy gives targets and an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        proto = Mlp()
        self.blocks = nn.ModuleList(copy.deepcopy(proto) for _ in range(3))
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(requires_grad=False)
        self.lock = threading.Lock()  # neither copied nor pickled
        self.act = lambda x: x * 0.5

    def forward(self, x: Any) -> Any:
        with self.lock, torch.inference_mode():
            y = x
            for block in self.teacher:
                y = block(y)
        aux: Any = 0.0
        for block in self.blocks:
            x = self.act(block(x))
            aux = aux + functional.mse_loss(x, y.clone())
        return x, aux


def deepcopied_teacher_with_lock() -> Example:
    """A frozen deep copy in inference mode gives targets; a lock and a lambda in the model cannot be
    copied or pickled, and need not be."""
    return Teacher(), (torch.randn(3, WIDTH),), lambda y: y[0].mean() + 0.1 * y[1]


class Delegate(nn.Module):
    """Passes unknown attributes on to what it wraps."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Wrapped(Chain):
    def __init__(self) -> None:
        super().__init__(*(Delegate(Mlp()) for _ in range(3)))
        self.same_blocks = self.blocks  # a second name, from a refactoring

    def forward(self, x: Any) -> Any:
        for block in self.same_blocks:
            x = block(x) * block.norm.weight
        return x


def delegating_wrappers_with_alias() -> Example:
    """Wrappers pass unknown attributes on to what they wrap, and the container has a second name through
    which the model runs it."""
    return example(Wrapped(), torch.randn(3, WIDTH))


class FlatParameters(nn.Module):
    """All weights are views of one flat storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(3 * WIDTH * WIDTH) / 3
        self.blocks = nn.ModuleList()
        for piece in flat.split(WIDTH * WIDTH):
            lin = linear(bias=False)
            lin.weight = nn.Parameter(piece.view(WIDTH, WIDTH))
            self.blocks.append(nn.Sequential(lin, nn.ELU()))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def parameters_in_one_storage() -> Example:
    """All weights are views of one flat storage, as optimizers with flat buffers make them."""
    return example(FlatParameters(), torch.randn(3, WIDTH))


class Lora(nn.Module):
    def __init__(self, rank: Any = 2) -> None:
        super().__init__()
        self.base = linear().requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, rank) / 4)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.base(x) + (x @ self.down.T) @ self.up.T)


class LoraModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList([Lora().requires_grad_(requires_grad=False), Lora(), Lora(), Lora()])

    def parameters(self, recurse: bool = True) -> Any:  # "only what trains"
        return (p for p in super().parameters(recurse) if p.requires_grad)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def lora_on_frozen_base() -> Example:
    """LoRA on frozen weights with a wholly frozen first block, whose input needs no gradient, and
    parameters() that lists only what trains."""
    return example(LoraModel(), torch.randint(0, 7, (2, 5)))


class Words(nn.Module):
    """Token ids through an embedding with sparse gradients, tied to no head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH, sparse=True)
        self.blocks = nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens: Tensor) -> Any:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def words() -> Example:
    """An embedding has sparse gradients, which SGD takes and AdamW does not."""
    return example(Words(), torch.randint(0, 16, (4, 5)))


def tied_linears() -> Example:
    """Two blocks share a linear layer."""
    net = Net(Layer(), Layer())
    net.blocks[1].linear = net.blocks[0].linear
    return example(net)
