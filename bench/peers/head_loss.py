"""Head and loss: chunked losses of others beside `chunk=budget`, with the bytes and times of each.

The head is a linear map to the vocabulary, the loss the mean cross entropy of all labels. Bytes are
activation peaks of live storages, without gradients of parameters. Times are ratios in turns. Kernels of
Liger and of CCE are written in Triton and run on CUDA alone; they are rows that say so.

    PYTHONPATH=FOLDER python -m bench.peers --part head_loss [--vocabularies 32000] [--fractions 0.05 0.25]
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.chunking.chunk_attempt import peak_bytes, relative_difference, results_of, run_pass
from bench.output import parser, publish
from bench.peers import libraries
from bench.peers.workload import CannotRunError
from bench.table import table_of
from harness.measure.speed.timing import host_time_s, in_turns
from harness.models.base import Batch
from harness.records.statistics import Ratio, ratio_to_baseline
from strategies.base import PlannedStep
from strategies.chunk.planning.chunk_plan import ChunkPlanner

_CHUNKS = 8
_ON_CUDA = {"Liger": "needs triton, CUDA", "CCE": "needs triton, CUDA"}
_TORCHTUNE = "modules/loss/ce_chunked_output_loss.py"


class HeadLoss(nn.Module):
    """A head and the mean cross entropy of its logits."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar, of hidden states (B, S, D) and labels (B, S)."""
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class ByHand(HeadLoss):
    """The same with the logits of one chunk of tokens at a time, each run again in backward.

    Source: torchtune's `LinearCrossEntropyLoss`.
    """

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        parts = zip(hidden.flatten(0, 1).chunk(_CHUNKS), labels.flatten().chunk(_CHUNKS), strict=True)
        sums = [checkpoint(self._sum, *part, use_reentrant=False) for part in parts]
        total: Tensor = torch.stack(sums).sum() / labels.numel()
        return total

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(hidden), labels, reduction="sum")


class Torchtune(HeadLoss):
    """torchtune's loss of logits in chunks, which the head makes chunk by chunk and autograd keeps."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary)
        self.loss: Any = torchtune_loss()(num_output_chunks=_CHUNKS)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        logits = [self.head(part) for part in hidden.chunk(_CHUNKS, dim=1)]
        loss: Tensor = self.loss(logits, labels)
        return loss


def torchtune_loss() -> Any:
    """Return `CEWithChunkedOutputLoss`, from its file: the package needs torchao and datasets to be imported.

    Raises:
        CannotRunError: torchtune is not installed, or has no such file.
    """
    spec = importlib.util.find_spec("torchtune")
    if spec is None or spec.origin is None:
        raise CannotRunError("not installed")
    file = Path(spec.origin).parent / _TORCHTUNE
    if not file.is_file():
        raise CannotRunError(f"torchtune has no {_TORCHTUNE}")
    found = importlib.util.spec_from_file_location("torchtune_chunked_loss", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.CEWithChunkedOutputLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPeer:
    """One way to compute head and loss.

    Fields:
        way: its name.
        vocabulary, tokens, width: sizes.
        activation_bytes: measured peak; `None` where it did not run.
        share: of the plain peak.
        difference: of gradients from the plain ones, relative.
        time: step time / the plain step's.
        reason: why it did not run.
    """

    way: str
    vocabulary: int
    tokens: int
    width: int
    activation_bytes: int | None = None
    share: float | None = None
    difference: float | None = None
    time: Ratio | None = None
    reason: str = ""


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; return 1 where a plan breaks its budget."""
    arguments = parser(__doc__, "head_loss", "peers")
    arguments.set_defaults(out=Path("outputs/bench/peers.head_loss.json"))
    arguments.add_argument("--vocabularies", nargs="+", type=int, default=[32_000])
    arguments.add_argument("--batch", type=int, default=2)
    arguments.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    arguments.add_argument("--width", type=int, default=256, help="of the hidden states")
    arguments.add_argument("--fractions", nargs="+", type=float, default=[0.05, 0.25], help="budgets")
    arguments.add_argument("--turns", type=int, default=6, help="timed steps of each")
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    shape = (chosen.batch, chosen.length, chosen.width)
    rows = [
        row
        for vocabulary in chosen.vocabularies
        for row in ways(shape, vocabulary, chosen.fractions, turns=chosen.turns)
    ]
    protocol = {"turns": chosen.turns, "chunks": _CHUNKS, "shape": shape, "packages": libraries.versions()}
    publish(_table(rows), chosen.out, protocol=protocol, results=rows)
    budgets = {f"chunk=budget {each:.0%}": each for each in chosen.fractions}
    return int(any((row.share or 0) > budgets.get(row.way, 1) for row in rows))


def ways(
    shape: tuple[int, int, int], vocabulary: int, fractions: Sequence[float], *, turns: int
) -> Iterator[HeadPeer]:
    """Yield the results of each way.

    Args:
        shape: of the hidden states, (B, S, D).
        vocabulary: logits of a token.
        fractions: budgets of `chunk=budget`, of the plain peak.
        turns: timed steps of each; 0 times nothing.
    """
    torch.manual_seed(0)
    batch, length, width = shape
    plain = HeadLoss(width, vocabulary)
    given = Batch(inputs=(torch.randn(shape), torch.randint(0, vocabulary, (batch, length))), targets=())
    models: dict[str, nn.Module] = {"plain": plain}
    refused = dict(_ON_CUDA)
    for name, make in (("by hand, recomputed", ByHand), ("torchtune", Torchtune)):
        try:
            models[name] = make(width, vocabulary)
        except CannotRunError as error:
            refused[name] = str(error)
        else:
            models[name].load_state_dict(plain.state_dict())
    planner = ChunkPlanner.of(plain, given.inputs, training=True)
    for each in fractions:
        plan = planner.plan(int(planner.unchunked_peak_bytes * each))
        models[f"chunk=budget {each:.0%}"] = plan.apply(copy.deepcopy(plain))
    row = partial(HeadPeer, vocabulary=vocabulary, tokens=batch * length, width=width)
    yield from _measured(models, given, row, turns)
    yield from (row(way=name, reason=reason) for name, reason in refused.items())


def _measured(
    models: Mapping[str, nn.Module], given: Batch, row: Callable[..., HeadPeer], turns: int
) -> Iterator[HeadPeer]:
    step = PlannedStep(loss=lambda outputs, _: outputs, loss_inputs=((),))
    gradients = {way: results_of(model, given, step) for way, model in models.items()}
    peaks = {way: peak_bytes(model, given, step) for way, model in models.items()}
    times: dict[str, tuple[float, ...]] = {}
    if turns:
        steps = [partial(run_pass, model, given, step) for model in models.values()]
        taken = in_turns(steps, warmup=1, turns=turns, clock=host_time_s)
        times = dict(zip(models, taken, strict=True))
    for way in models:
        yield row(
            way=way,
            activation_bytes=peaks[way],
            share=peaks[way] / peaks["plain"],
            difference=relative_difference(gradients[way], gradients["plain"]),
            time=ratio_to_baseline(times[way], times["plain"]) if times else None,
        )


def _table(rows: Sequence[HeadPeer]) -> Table:
    return table_of(
        rows,
        {
            "vocabulary": "vocabulary:,",
            "tokens": "tokens:,",
            "way": "way",
            "activations": "activation_bytes:,",
            "/ plain": "share:.1%",
            "time / plain": "time:2",
            "difference": "difference:.1e",
            "": "reason",
        },
        caption=f"by hand and torchtune: {_CHUNKS} chunks of tokens",
    )
