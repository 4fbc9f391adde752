"""Random programs of `tests.matrix.stale`: small models made of what people write into forwards.

A program is two to three blocks of random idioms under one root, with a linear head. Every block can `vary`
what its forward asks of Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from strategies.regions.blocks import plain_class

B, S, D, WIDE, HEADS = 2, 6, 8, 16, 2


class Block(nn.Module):
    """A residual block; what is between up and down is the idiom's.

    Args:
        rng: draws what it is made of.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.norm = rng.choice([nn.LayerNorm, nn.RMSNorm, nn.Identity])(D)
        self.up = nn.Linear(D, WIDE)
        self.down = nn.Linear(WIDE, D, bias=rng.random() < 0.5)
        self.gives = "tensor"

    def between(self, h: Tensor) -> Tensor:
        """Return what the idiom makes of wide features."""
        return functional.gelu(h)

    def vary(self, rng: random.Random) -> None:
        """Change what forward asks of Python."""
        self.gives = rng.choice(["tensor", "tuple", "dict", "three"])

    def forward(self, x: Tensor, _first: Tensor, scale: float = 1.0) -> Any:
        """Return the features, in one of several structures."""
        h: Tensor = x + scale * self.down(self.between(self.up(self.norm(x))))
        if self.gives == "tensor":
            return h
        if self.gives == "dict":
            return {"hidden": h, "extra": h.tanh()}
        return (h, h.sin()) if self.gives == "tuple" else (h, h.sin(), h.cos())


class _Attention(Block):
    """Heads by a number; scores by hand or by torch's function."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.heads = HEADS
        self.is_fused = rng.random() < 0.5
        self.is_causal = False

    def vary(self, rng: random.Random) -> None:
        name = rng.choice(["heads", "is_fused", "is_causal"])
        setattr(self, name, 4 if name == "heads" else not getattr(self, name))

    def between(self, h: Tensor) -> Tensor:
        parts = h.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.is_fused:
            operands = parts, 0.5 * parts, parts.tanh()
            mixed = functional.scaled_dot_product_attention(*operands, is_causal=self.is_causal)
        else:
            scores = parts @ parts.transpose(-1, -2) / parts.shape[-1] ** 0.5
            if self.is_causal:
                mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).tril()
                scores = scores.masked_fill(~mask, float("-inf"))
            mixed = scores.softmax(-1) @ parts
        return mixed.transpose(1, 2).flatten(2)


class _Drops(Block):
    """Dropout, whose rate may change."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.dropout = nn.Dropout(0.25)

    def vary(self, rng: random.Random) -> None:
        self.dropout.p = rng.choice([0.0, 0.4])

    def between(self, h: Tensor) -> Tensor:
        outputs: Tensor = self.dropout(functional.relu(h))
        return outputs


class _Branches(Block):
    """Branches on a word, a number, a missing attribute, the class, and torch's own state."""

    slope: ClassVar[float] = 1.0

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.kind = "relu"
        self.power = 1.0

    def vary(self, rng: random.Random) -> None:
        what = rng.choice(["kind", "power", "missing", "sign"])
        if what == "missing":
            self.shift = None
        elif what == "kind":
            self.kind = "tanh" if self.kind == "relu" else "relu"
        else:
            self.power = 2.0 if what == "power" else -0.0

    def between(self, h: Tensor) -> Tensor:
        h = h.relu() if self.kind == "relu" else h.tanh()
        h = h + float(np.copysign(0.5, self.power)) * self.slope
        if hasattr(self, "shift"):
            h = h + 1.0
        if self.training:
            h = h * 1.5
        if not torch.is_grad_enabled():
            h = h + 0.25
        return h * 2.0 if self.up.weight.requires_grad and h.dtype is torch.float64 else h


class _Loops(Block):
    """A loop over a list of modules, as often as a number says, and by keyword."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.steps = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
        self.repeats = 1

    def vary(self, rng: random.Random) -> None:
        what = rng.choice(["repeats", "append", "order"])
        if what == "repeats":
            self.repeats = 3 - self.repeats
        elif what == "append":
            self.steps.append(nn.Tanh())
        else:
            self.steps = nn.ModuleList(reversed(list(self.steps)))

    def between(self, h: Tensor) -> Tensor:
        for _ in range(self.repeats):
            for step in self.steps:
                h = h + step(input=h) if isinstance(step, nn.Linear) else step(h)
        return h


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, 2 * WIDE)
        self.gives = "dict"

    def forward(self, h: Tensor, *, scale: float) -> Any:
        one, other = (scale * self.linear(h)).chunk(2, -1)
        if self.gives == "dict":
            return {"value": one, "gate": other, "none": None}
        return (one, other) if self.gives == "pair" else torch.cat([one, other], -1)


class _Returns(Block):
    """A module inside that returns a dictionary, a tuple or a tensor, and takes a number by name."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.gate = _Gate()

    def vary(self, rng: random.Random) -> None:
        self.gate.gives = rng.choice(["dict", "pair", "tensor"])

    def between(self, h: Tensor) -> Tensor:
        given = self.gate(h, scale=0.5)
        if isinstance(given, dict):
            given = given["value"], given["gate"].sigmoid()
        outputs: Tensor = given[0] + given[1] if isinstance(given, tuple) else given[..., :WIDE].tanh()
        return outputs


class _Views(Block):
    """Slices, concatenation, and writes to views."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.at = WIDE // 2

    def vary(self, rng: random.Random) -> None:
        self.at = rng.choice([2, WIDE // 4])

    def between(self, h: Tensor) -> Tensor:
        one, other = h.split([self.at, WIDE - self.at], -1)
        h = torch.cat([other.sigmoid(), one], -1).clone()
        h[..., : self.at].mul_(3.0)
        h.view(-1, WIDE)[:, 0] = 0.5
        return h


class _Tables(Block):
    """A list, an array, a dictionary, an object in an object, and a function with arguments."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.numbers = [1.0, 1.0]
        self.table = np.ones(3)
        self.names = {"act": "gelu", "deep": [{"scale": 1.0}]}
        self.options = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
        self.act: Callable[..., Tensor] = partial(functional.leaky_relu, negative_slope=0.1)

    def vary(self, rng: random.Random) -> None:
        changes: list[Callable[[], Any]] = [
            lambda: self.numbers.__setitem__(1, 2.0),
            lambda: self.numbers.append(3.0),
            lambda: self.table.__setitem__(0, 2.0),
            lambda: self.names.__setitem__("act", "tanh"),
            lambda: self.names["deep"][0].__setitem__("scale", 2.0),  # type: ignore[call-overload, index, union-attr]
            lambda: setattr(self.options.inner, "scale", 2.0),
            lambda: setattr(self, "act", partial(functional.leaky_relu, negative_slope=0.5)),
            lambda: setattr(self, "act", functional.silu),
        ]
        rng.choice(changes)()

    def between(self, h: Tensor) -> Tensor:
        h = functional.gelu(h) if self.names["act"] == "gelu" else h.tanh()
        h = h * float(self.table[0]) * self.names["deep"][0]["scale"]  # type: ignore[call-overload, index]
        for number in self.numbers:
            h = h + number
        return self.act(h * self.options.inner.scale)


class _Buffers(Block):
    """A buffer that is read, one that is written in training, and a plain tensor."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.register_buffer("scale", torch.full((WIDE,), 0.5))
        self.register_buffer("average", torch.zeros(WIDE))
        self.scale: Tensor
        self.average: Tensor
        self.table = torch.linspace(0, 1, WIDE)
        self.updates = rng.random() < 0.5

    def vary(self, rng: random.Random) -> None:
        what = rng.choice(["in place", "another", "updates"])
        if what == "in place":
            self.scale.mul_(2.0)
        elif what == "another":
            self.scale = torch.full_like(self.scale, 0.25)
        else:
            self.updates = not self.updates

    def between(self, h: Tensor) -> Tensor:
        if self.updates and self.training:
            self.average.mul_(0.9).add_(h.detach().mean((0, 1)).to(self.average.dtype) * 0.1)
        return functional.gelu(h * self.scale + self.table.to(h.dtype)) + self.average


class _Tied(Block):
    """A parameter and a module under two names."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.gain = self.twin = nn.Parameter(torch.ones(WIDE))
        self.one = self.other = nn.Linear(WIDE, WIDE)

    def vary(self, rng: random.Random) -> None:
        what = rng.choice(["twin", "other", "gain"])
        like = self.gain.detach()
        if what == "other":
            torch.manual_seed(5)
            self.other = nn.Linear(WIDE, WIDE, dtype=like.dtype)
        else:
            setattr(self, what, nn.Parameter(like * 2.0))

    def between(self, h: Tensor) -> Tensor:
        outputs: Tensor = self.other(h * self.twin).relu()
        return outputs


class _Residual(Block):
    """Asks whether its input is the first one, and writes without gradients."""

    def vary(self, rng: random.Random) -> None:
        self.gives = rng.choice(["tensor", "tuple"])

    def forward(self, x: Tensor, first: Tensor, scale: float = 1.0) -> Any:
        with torch.no_grad():
            gate = x.mean(-1, keepdim=True).sigmoid()
        h = super().forward(x, first, scale)
        more = 0.0 * gate if x is first else gate * first
        return (h[0] + more, *h[1:]) if isinstance(h, tuple) else h + more


class _Checkpoints(Block):
    """Checkpoints itself, as many published blocks do."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.checkpoints = True

    def vary(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            super().vary(rng)
        else:
            self.checkpoints = not self.checkpoints

    def forward(self, x: Tensor, first: Tensor, scale: float = 1.0) -> Any:
        if not self.checkpoints:
            return super().forward(x, first, scale)
        outputs: Any = checkpoint(super().forward, x, first, scale, use_reentrant=False)
        return outputs


class _Complex(Block):
    """Complex weights, of which a change of dtype leaves the real parts."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.turn = nn.Parameter(torch.randn(WIDE // 2, dtype=torch.cdouble))
        self.is_conjugate = False

    def vary(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            super().vary(rng)
        else:
            self.is_conjugate = not self.is_conjugate

    def between(self, h: Tensor) -> Tensor:
        turn = self.turn.conj() if self.is_conjugate else self.turn
        one, other = h.to(self.down.weight.dtype).chunk(2, -1)
        turned = (torch.complex(one, other) * turn).tanh() * turn
        return torch.cat([turned.abs(), turned.angle()], -1).to(h.dtype)


class _Hooks(Block):
    """A hook on a tensor, which scales its gradient."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.share: float | None = 0.5

    def vary(self, rng: random.Random) -> None:
        self.share = rng.choice([None, 2.0, 0.25])

    def between(self, h: Tensor) -> Tensor:
        h, share = functional.gelu(h), self.share
        if share is not None and h.requires_grad:
            h.register_hook(lambda gradient: gradient * share)
        return h


class _Configured(Block):
    """Reads an object that all blocks share, on which the model's loop says which block it is."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.config = SimpleNamespace(depth=0, step=0.5)

    def vary(self, rng: random.Random) -> None:
        self.config.step = rng.choice([0.25, 1.0])

    def between(self, h: Tensor) -> Tensor:
        outputs: Tensor = functional.gelu(h) * (1.0 + self.config.step * self.config.depth)
        return outputs


class _Draws(Block):
    """Draws from generators of its own, NumPy's and torch's."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.numbers = np.random.default_rng(5)
        self.noise = torch.Generator().manual_seed(5)
        self.is_noisy = rng.random() < 0.5

    def vary(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            super().vary(rng)
        else:
            self.is_noisy = not self.is_noisy

    def between(self, h: Tensor) -> Tensor:
        h = functional.gelu(h) * (1.0 + float(self.numbers.random()))
        return h + torch.rand(WIDE, generator=self.noise).to(h.dtype) if self.is_noisy else h


IDIOMS: tuple[type[Block], ...] = (
    Block,
    _Attention,
    _Drops,
    _Branches,
    _Loops,
    _Returns,
    _Views,
    _Tables,
    _Buffers,
    _Tied,
    _Residual,
    _Checkpoints,
    _Complex,
    _Hooks,
    _Configured,
    _Draws,
)


class Program(nn.Module):
    """Blocks, with a residual to the input if there is a second one, and a head.

    Half of them have something before the blocks, half a norm behind them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        kinds = [rng.choice(IDIOMS) for _ in range(rng.choice([2, 2, 3]))]
        alike = rng.random() < 0.5  # blocks of one class share programs
        self.layers = nn.ModuleList(rng.choice(kinds[:1] if alike else kinds)(rng) for _ in kinds)
        self.head = nn.Linear(D, D)
        self.gives = rng.choice(["tensor", "dict"])
        self.collects = False
        self.start = nn.Linear(D, D) if rng.random() < 0.5 else None
        self.begins = rng.choice(["plain", "scaled", "written", "noisy"])
        self.norm = nn.LayerNorm(D) if rng.random() < 0.5 else None
        configured = [layer for layer in self.layers if isinstance(layer, _Configured)]
        self.config = configured[0].config if configured else None
        for layer in configured:
            layer.config = configured[0].config

    @property
    def idioms(self) -> set[str]:
        """Names of the idioms of its blocks."""
        return {plain_class(layer).__name__.strip("_").lower() for layer in self.layers}

    def vary(self, rng: random.Random) -> None:
        """Change what forward asks of Python."""
        if rng.random() < 0.5:
            self.collects = not self.collects
        else:
            self.gives = "dict" if self.gives == "tensor" else "tensor"

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Any:
        """Return the head's features, in one of several structures."""
        h, seen = x if self.start is None else self._begun(self.start(x)), []
        for depth, layer in enumerate(self.layers):
            if self.config is not None:
                self.config.depth = depth
            given = layer(h, y, scale=scale)
            given = given["hidden"] + given["extra"] if isinstance(given, dict) else given
            h = torch.stack(given).sum(0) if isinstance(given, tuple) else given
            seen.append(h)
        h = self.head(h if self.norm is None else self.norm(h)) + (x if x is y else x - 0.5 * y)
        if self.collects:
            return {"outputs": h, "hidden": tuple(seen)}
        return {"outputs": h} if self.gives == "dict" else h

    def _begun(self, h: Tensor) -> Tensor:
        """Return what the first block gets."""
        if self.begins == "scaled":
            return h * 2
        if self.begins == "written":
            return h.relu_()
        return functional.dropout(h, 0.2, self.training) if self.begins == "noisy" else h
