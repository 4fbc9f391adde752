"""Head and loss of a language model in training: plain, chunked by hand, and planned.

The head is a linear map to the vocabulary; the loss is the mean cross entropy, of all labels or of labels
shifted by one. By hand means what a training library does: the logits of a fixed number of chunks of tokens,
each run again in backward. Bytes are activation peaks of live storages, exact and without gradients of
parameters. Times are medians of rounds in which all of them take turns. Kernels of Triton run on no CPU and
are left out.

    python -m bench.chunking --part head_loss [--vocabularies 32000 ...] [--batches 1 2 4] [--fractions 0.25]

Source: torchtune's `LinearCrossEntropyLoss` for the loss by hand.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.chunking.chunk_attempt import peak_bytes, relative_difference, results_of
from bench.output import parser, publish
from bench.table import table_of
from harness.models.base import Batch
from strategies.base import PlannedStep
from strategies.chunk.planning.chunk_plan import ChunkPlanner

_ROUNDS = 3
_CHUNKS = 8  # of the loss by hand


class HeadLoss(nn.Module):
    """A head and the mean cross entropy of logits; with `is_shifted` each token has the label after it."""

    def __init__(self, width: int, vocabulary: int, *, is_shifted: bool) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.is_shifted = is_shifted

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar, of hidden states (B, S, D) and labels (B, S)."""
        logits = self.head(hidden)
        if self.is_shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ByHand(HeadLoss):
    """The same with the logits of one chunk of tokens at a time."""

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        if self.is_shifted:
            hidden, labels = hidden[:, :-1], labels[:, 1:]
        parts = zip(hidden.flatten(0, 1).chunk(_CHUNKS), labels.flatten().chunk(_CHUNKS), strict=True)
        sums = [checkpoint(self._sum, *part, use_reentrant=False) for part in parts]
        total: Tensor = torch.stack(sums).sum() / labels.numel()
        return total

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(hidden), labels, reduction="sum")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLossResult:
    """One way to compute head and loss.

    Fields:
        way: `plain`, `by hand`, or `planned` with its budget.
        vocabulary, batch, length, width: sizes.
        is_shifted: whether each token has the label after it.
        peak_bytes: activation peak of forward and backward, measured.
        fraction: budget / peak of the plain loss.
        predicted_bytes: peak by the plan.
        share: peak / that of the plain loss.
        slowdown: median time / that of the plain loss.
        relative_difference: of gradients, from the plain loss's; as in `bench.chunking`.
    """

    way: str
    vocabulary: int
    batch: int
    length: int
    width: int
    is_shifted: bool
    peak_bytes: int
    fraction: float | None = None
    predicted_bytes: int | None = None
    share: float
    slowdown: float
    relative_difference: float


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; return 1 where a plan breaks its budget."""
    arguments = parser(__doc__, "head_loss", "chunking")
    arguments.add_argument("--vocabularies", nargs="+", type=int, default=[32_000, 128_256])
    arguments.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4])
    arguments.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    arguments.add_argument("--width", type=int, default=256, help="of the hidden states")
    arguments.add_argument(
        "--fractions", nargs="+", type=float, default=[0.05, 0.25], help="budgets / peak of the plain loss"
    )
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    rows = [
        row
        for vocabulary, batch, is_shifted in product(chosen.vocabularies, chosen.batches, (False, True))
        for row in _rows(
            (batch, chosen.length, chosen.width), vocabulary, chosen.fractions, is_shifted=is_shifted
        )
    ]
    protocol = {"rounds": _ROUNDS, "chunks_by_hand": _CHUNKS, "fractions": chosen.fractions}
    publish(_table(rows), chosen.out, protocol=protocol, results=[asdict(row) for row in rows])
    return int(any(row.fraction is not None and row.share > row.fraction for row in rows))


def _rows(
    shape: tuple[int, int, int], vocabulary: int, fractions: Sequence[float], *, is_shifted: bool
) -> Iterator[HeadLossResult]:
    """Yield the results of each way for hidden states of `shape` (B, S, D)."""
    torch.manual_seed(0)
    batch, length, width = shape
    plain = HeadLoss(width, vocabulary, is_shifted=is_shifted)
    by_hand = ByHand(width, vocabulary, is_shifted=is_shifted)
    by_hand.load_state_dict(plain.state_dict())
    given = Batch(inputs=(torch.randn(shape), torch.randint(0, vocabulary, (batch, length))), targets=())
    planner = ChunkPlanner.of(plain, given.inputs, training=True)
    plans = {each: planner.plan(int(planner.unchunked_peak_bytes * each)) for each in fractions}
    planned = {f"planned {each:.0%}": plan.apply(copy.deepcopy(plain)) for each, plan in plans.items()}
    ways: dict[str, nn.Module] = {"plain": plain, "by hand": by_hand, **planned}
    step = PlannedStep(loss=_itself, loss_inputs=((),))
    gradients = {way: results_of(model, given, step) for way, model in ways.items()}
    peaks = {way: peak_bytes(model, given, step) for way, model in ways.items()}
    times = _median_times({way: _training(model, given, step) for way, model in ways.items()})
    for way, fraction in zip(ways, (None, None, *fractions), strict=True):
        yield HeadLossResult(
            way=way,
            vocabulary=vocabulary,
            batch=batch,
            length=length,
            width=width,
            is_shifted=is_shifted,
            peak_bytes=peaks[way],
            fraction=fraction,
            predicted_bytes=None if fraction is None else plans[fraction].predicted_peak_bytes,
            share=peaks[way] / peaks["plain"],
            slowdown=times[way] / times["plain"],
            relative_difference=relative_difference(gradients[way], gradients["plain"]),
        )


def _itself(outputs: Tensor, _: object) -> Tensor:
    return outputs


def _training(model: nn.Module, given: Batch, step: PlannedStep) -> Callable[[], object]:
    return lambda: results_of(model, given, step)


def _median_times(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each way; they take turns."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            taken[way].append(time.perf_counter() - start)
    return {way: median(each) for way, each in taken.items()}


def _table(rows: list[HeadLossResult]) -> Table:
    return table_of(
        rows,
        {
            "vocabulary": "vocabulary:,",
            "batch": "batch",
            "labels": lambda row: "shifted" if row.is_shifted else "all",
            "way": "way",
            "activations": "peak_bytes:,",
            "predicted": "predicted_bytes:,",
            "/ plain": "share:.1%",
            "time / plain": "slowdown:.2f",
            "difference": "relative_difference:.1e",
        },
        caption=f"by hand: {_CHUNKS} chunks of tokens, each run again in backward",
    )
