"""Small models on which strategies are examined: B batch, S sequence, D width, H heads, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, BATCH, SEQUENCE = 11, 16, 2, 2, 8


class Block(nn.Module):
    """Attention and MLP with dropout, a buffer that forward updates not, and a keyword input."""

    scale: Tensor

    def __init__(self, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, inputs: Tensor, *, shift: Tensor | None = None) -> Tensor:
        x_BSD = inputs
        batch, sequence, width = x_BSD.shape
        qkv = self.qkv(self.norm(x_BSD)).view(batch, sequence, 3, HEADS, width // HEADS)
        q_BHSK, k_BHSK, v_BHSK = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            q_BHSK, k_BHSK, v_BHSK, dropout_p=self.dropout.p if self.training else 0.0, is_causal=True
        )
        x_BSD = x_BSD + self.dropout(self.out(mixed.transpose(1, 2).reshape(x_BSD.shape))) * self.scale
        if shift is not None:
            x_BSD = x_BSD + shift
        outputs: Tensor = x_BSD + self.dropout(self.down(functional.gelu(self.up(x_BSD))))
        return outputs


class Toy(nn.Module):
    """An embedding, three blocks under `layers`, and a head."""

    def __init__(
        self,
        *,
        bias: bool = True,
        dropout: float = 0.1,
        tied: bool = False,
        shared: bool = False,
        keywords: bool = False,
        container: str = "list",
    ) -> None:
        super().__init__()
        blocks = [Block(bias=bias, dropout=dropout) for _ in range(3)]
        if shared:
            blocks[2] = blocks[0]
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers: Any = {
            "list": lambda: nn.ModuleList(blocks),
            "dict": lambda: nn.ModuleDict({f"b{index}": block for index, block in enumerate(blocks)}),
            "sequential": lambda: nn.Sequential(*blocks),
        }[container]()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.keywords = keywords
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens)
        for block in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            shift = x_BSD.mean(-1, keepdim=True) if self.keywords else None
            x_BSD = block(x_BSD, shift=shift)
        logits: Tensor = self.head(x_BSD)
        return logits


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Layers(nn.Module):
    """Modules under `layers`, one after another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stack(nn.Module):
    """One block under `layers`, and nothing else."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.block(x)
        return outputs

    @property
    def block(self) -> nn.Module:
        return self.layers[0]


MODELS: dict[str, dict[str, Any]] = {
    "biased": {},
    "bias_free": {"bias": False},
    "no_dropout": {"dropout": 0.0},
    "tied_weights": {"tied": True},
    "shared_block": {"shared": True},
    "keyword_inputs": {"keywords": True},
    "module_dict": {"container": "dict"},
    "sequential": {"container": "sequential"},
}


def toy(name: str = "biased") -> Toy:
    """Return the named model, always with the same weights."""
    torch.manual_seed(0)
    return Toy(**MODELS[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Everything that must be equal after one training step."""

    outputs: Tensor
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng_state: Tensor


def train_step(model: nn.Module, call: Any = None) -> Step:
    """Run forward and backward of one fixed batch, under a fixed seed, through `call` or the model."""
    torch.manual_seed(3)
    tokens_BS = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    model.zero_grad()
    outputs = (model if call is None else call)(tokens_BS)
    loss = functional.cross_entropy(outputs.flatten(0, 1), tokens_BS.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return Step(
        outputs=outputs.detach(),
        loss=loss.detach(),
        gradients={name: p.grad for name, p in model.named_parameters()},
        buffers={name: b.clone() for name, b in model.named_buffers()},
        rng_state=torch.get_rng_state(),
    )


def differences(expected: Step, actual: Step) -> list[str]:
    """Return the names of everything that is not equal bit for bit; absence is a difference too."""
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
        part: (getattr(expected, part), getattr(actual, part)) for part in ("outputs", "loss", "rng_state")
    }
    for part in ("gradients", "buffers"):
        old, new = getattr(expected, part), getattr(actual, part)
        if list(old) != list(new):
            return [f"names of {part}"]
        pairs |= {f"{part}: {name}": (old[name], new[name]) for name in old}
    return [name for name, pair in pairs.items() if not _equal(*pair)]


def _equal(expected: Tensor | None, actual: Tensor | None) -> bool:
    if expected is None or actual is None:
        return expected is actual
    return expected.dtype == actual.dtype and torch.equal(expected, actual)
