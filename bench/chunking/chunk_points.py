"""Chunking at the points that others have published, and the longest sequence within a fixed number of bytes.

Plain blocks of attention, and language models with their loss inside. Each point states a budget as a share
of the activation peak as it is, and the time that it may take. Bytes are measured, times are medians of
rounds in which the plain model and the planned one take turns.

    python -m bench.chunking --part chunk_points [--training]

Source: Zhao et al. 2024, AutoChunk, arXiv:2401.10652, for the sequences and the budgets of forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from bench.chunking.chunk_attempt import Attempt, PlannedPass, peak_above_gradients_bytes
from bench.output import parser, publish
from bench.table import table_of
from harness.models.base import Batch
from strategies.base import PlannedStep
from strategies.chunk import InfeasibleBudget
from strategies.chunk.planning.chunk_plan import ChunkPlanner

_LONGEST = 1 << 17


class Attention(nn.Module):
    """A block of plain attention and an MLP, in residual branches; scores are whole matrices."""

    def __init__(self, width: int, n_heads: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.n_heads, self.is_causal = n_heads, is_causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        x_BSD = x_BSD + self._attend(self.norms[0](x_BSD))
        grown: Tensor = self.down(functional.gelu(self.up(self.norms[1](x_BSD))))
        return x_BSD + grown

    def _attend(self, x_BSD: Tensor) -> Tensor:
        batch, length, width = x_BSD.shape
        qkv = self.qkv(x_BSD).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        q_BHSK, k_BHSK, v_BHSK = qkv.unbind(0)
        scores_BHST = (q_BHSK @ k_BHSK.transpose(-1, -2)) * q_BHSK.size(-1) ** -0.5
        if self.is_causal:
            place_S = torch.arange(length, device=x_BSD.device)
            scores_BHST = scores_BHST.masked_fill(place_S > place_S.unsqueeze(1), float("-inf"))
        mixed_BHSK = scores_BHST.softmax(-1) @ v_BHSK
        result: Tensor = self.out(mixed_BHSK.transpose(1, 2).reshape(batch, length, width))
        return result


class Stack(nn.Sequential):
    """Blocks one after the other."""

    def __init__(self, n_layers: int, width: int, n_heads: int, *, is_causal: bool = False) -> None:
        super().__init__(*(Attention(width, n_heads, is_causal=is_causal) for _ in range(n_layers)))


class WithLoss(nn.Module):
    """A language model that returns its loss, so that head and loss can be chunked."""

    def __init__(self, n_layers: int, width: int, n_heads: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.stack = Stack(n_layers, width, n_heads, is_causal=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the mean cross entropy of the tokens themselves."""
        logits_BSV = self.head(self.norm(self.stack(self.embedding(tokens_BS))))
        return functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS.flatten())


@dataclass(frozen=True, slots=True)
class Point:
    """A model, a budget and the time it may take.

    Fields:
        make: returns the model.
        sample: returns its inputs.
        fraction: budget / activation peak as it is.
        allowed_slowdown: time / that of the plain model; `None` for any.
    """

    name: str
    make: Callable[[], nn.Module]
    sample: Callable[[], tuple[Tensor, ...]]
    fraction: float
    allowed_slowdown: float | None


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 16_384, (1, 1_024)),)


def _values(length: int, width: int = 256) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(1, length, width),)


_GPT_MIB = 16.6 / 111  # what AutoChunk's code needs of what the plain model needs
_LANGUAGE = ("gpt with head and loss", lambda: WithLoss(4, 256, 4, 16_384), _tokens)
_GPT = ("gpt 768 x 1,024", lambda: Stack(2, 768, 12, is_causal=True), _values(1_024, 768))
_SHORT = ("attention 2,048", lambda: Stack(2, 256, 4), _values(2_048))
FORWARD = (
    Point("attention 2,048", lambda: Stack(1, 256, 4), _values(2_048), 0.1, 1.18),
    Point("attention 4,096", lambda: Stack(1, 256, 4), _values(4_096), 0.05, 1.05),
    Point(*_GPT, _GPT_MIB, 1.1),
    Point(*_GPT, 12 / 111, None),
    Point("vit 384 x 2,305", lambda: Stack(4, 384, 6), _values(2_305, 384), 0.09, 1.05),
    Point(*_LANGUAGE, 0.2, 1.1),
)
TRAINING = (
    Point(*_LANGUAGE, 0.1, 1.22),
    Point(*_LANGUAGE, 0.07, 1.3),
    Point(*_LANGUAGE, 0.02, 1.3),
    Point(*_SHORT, 0.2, 1.2),
    Point(*_SHORT, 0.1, 1.4),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointResult(Attempt):
    """What came out of one point.

    Fields:
        above_gradients: the peak of activations and gradients together, less all gradients, planned / as it
            is; in training.
    """

    name: str
    allowed_slowdown: float | None
    above_gradients: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """The longest sequence of `attention` within the bytes that `unchunked` tokens need as they are."""

    budget_bytes: int
    unchunked: int
    chunked: int

    def __str__(self) -> str:
        tokens = f"{self.unchunked:,} tokens as it is, {self.chunked:,} in chunks"
        return f"in {self.budget_bytes:,} bytes: {tokens}"


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; return 1 where a budget is not kept."""
    arguments = parser(__doc__, "chunk_points", "chunking")
    arguments.add_argument("--training", action="store_true", help="the points of training")
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    points = TRAINING if chosen.training else FORWARD
    rows = [_row(point, training=chosen.training) for point in points]
    longest = None if chosen.training else _longest(1_024)
    protocol = {"training": chosen.training, "longest": longest}
    publish(_table(rows, longest), chosen.out, protocol=protocol, results=rows)
    return int(
        any(row.measured_bytes and row.measured_bytes > row.fraction * row.unchunked_bytes for row in rows)
    )


def _row(point: Point, *, training: bool) -> PointResult:
    torch.manual_seed(0)
    model, sample = point.make().train(training), point.sample()
    step = PlannedStep(loss=_sum, loss_inputs=((),)) if training else None
    case = PlannedPass.of(model, Batch(inputs=sample, targets=()), step)
    start = time.perf_counter()
    fields, chunked = case.attempt(case.planning(), point.fraction, started_s=start, is_timed=True)
    if chunked is not None and step is not None:
        above, plain = (peak_above_gradients_bytes(each, case.batch, step) for each in (chunked.model, model))
        fields |= {"above_gradients": above / plain}
    return PointResult(name=point.name, allowed_slowdown=point.allowed_slowdown, **fields)


def _sum(outputs: Tensor, _: Any) -> Tensor:
    return outputs.sum()


def _longest(tokens: int) -> Longest:
    """Return the longest power of two that the plans of `Stack` reach within what `tokens` need unchunked."""
    with torch.device("meta"):
        model = Stack(2, 256, 4).eval()
    budget = ChunkPlanner.of(model, (torch.empty(1, tokens, 256),)).unchunked_peak_bytes
    longest = tokens
    while longest < _LONGEST:
        sample = (torch.empty(1, 2 * longest, 256, device="meta"),)
        try:
            ChunkPlanner.of(model, sample).plan(budget)
        except InfeasibleBudget:
            break
        longest *= 2
    return Longest(budget_bytes=budget, unchunked=tokens, chunked=longest)


def _table(rows: list[PointResult], longest: Longest | None) -> Table:
    return table_of(
        rows,
        {
            "model": "name",
            "budget": "fraction:.0%",
            "as it is": "unchunked_bytes:,",
            "predicted": lambda row: "refused" if row.predicted_bytes is None else f"{row.predicted_bytes:,}",
            "measured": "measured_bytes:,",
            "measured / as it is": lambda row: (
                "-" if row.measured_bytes is None else f"{row.measured_bytes / row.unchunked_bytes:.1%}"
            ),
            "above gradients": "above_gradients:.1%",
            "smallest / as it is": lambda row: f"{row.minimum_bytes / row.unchunked_bytes:.1%}",
            "time / as it is": "slowdown:.2f",
            "may take": "allowed_slowdown:.2f",
            "difference": "relative_difference:.1e",
            "planned in, s": "planning_s:.1f",
        },
        caption=None if longest is None else str(longest),
    )
