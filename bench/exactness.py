"""Two meters of memory on one step: live storages against the counting CPU allocator, to the byte.

Every AC variant on every model, with math attention and with the CPU's flash kernel, in fp32 and bf16. Where
the allocator's peak is higher, kernels hold memory of their own; a third run watches each operator and names
them. `unexplained` is what is left then, and should be 0 everywhere. With few tokens the peak lies in the
optimizer; batch normalisation has a kernel whose memory raises the peak in fp32.

    python -m bench.exactness --models mlp batch_norm
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product

import torch
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.output import parser, publish
from bench.trials import experiments
from harness.experiment.data import source_of
from harness.experiment.experiment import Experiment, name_of
from harness.measure.memory.allocator import CpuWorkspaceProbe
from harness.measure.memory.counting_allocator import CountingAllocator, counting_allocator
from harness.measure.step import allocator_truth, instrument
from harness.models.base import Batch
from harness.trial.assemble import Assembled, assemble
from strategies import ac_variants
from strategies.regions.host import allocating_on_host

SEQUENCE_LENGTH, WIDTH, VOCABULARY = 64, 128, 16
MODELS = {name: (f"model={name}",) for name in ("mlp", "gpt_nano", "llama_nano", "moe_nano", "hf")} | {
    "mlp, 16 tokens": ("model=mlp", "sequence_length=16"),
    "gpt_nano, 16 tokens": ("model=gpt_nano", "sequence_length=16"),
    "batch_norm": (
        "model=python",
        "model.factory=bench.exactness:batch_norm",
        f"model.vocab_size={VOCABULARY}",
    ),
}
DTYPES = ("fp32", "bf16")
ATTENTIONS = ("math", "fused")
SIZES = ("data=synthetic", "batch_size=4", f"sequence_length={SEQUENCE_LENGTH}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Both meters on one step.

    Fields:
        peak_phase: where the peak of live storages lies.
        live_peak_bytes: by definition, host copies included: the allocator cannot tell them apart on CPU.
        allocator_peak_bytes: by the allocator.
        workspace_bytes: their difference.
        unexplained_bytes: what is left of it when the operators' own memory is added to the live storages.
        workspaces: operators that hold memory of their own, with the most that one call held.
    """

    model: str
    ac: str
    dtype: str
    attention: str
    peak_phase: str
    live_peak_bytes: int
    allocator_peak_bytes: int
    workspace_bytes: int
    unexplained_bytes: int
    workspaces: dict[str, int]


def main() -> int:
    """Measure, print the table, write the JSON; return 1 if a byte is left unexplained."""
    arguments = _arguments()
    allocator = counting_allocator()
    if allocator is None or not allocator.install():
        sys.exit("bench.exactness needs a C++ compiler (g++, or the one that CXX names)")
    torch.set_num_threads(1)
    rows = [_measure(allocator, *point) for point in _points(arguments.models)]
    publish(
        _table(rows),
        arguments.out,
        protocol={"overrides": SIZES, "models": {name: MODELS[name] for name in arguments.models}},
        results=[asdict(row) for row in rows],
    )
    return int(any(row.unexplained_bytes for row in rows))


def batch_norm(dropout: float) -> nn.Module:
    """Return a model whose blocks normalise over the batch: tokens (B, S) to logits (B, S, V)."""
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(SEQUENCE_LENGTH), nn.ReLU()) for _ in range(4)
    )
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(VOCABULARY, WIDTH),
            layers=nn.Sequential(*blocks),
            dropout=nn.Dropout(dropout),
            head=nn.Linear(WIDTH, VOCABULARY),
        )
    )


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "exactness")
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    return made.parse_args()


def _points(models: list[str]) -> Iterator[tuple[str, str, Experiment]]:
    """Return model, attention and experiment of each row; the CPU's flash kernel has no dropout."""
    points = list(product(models, DTYPES, ac_variants, ATTENTIONS))
    chosen = experiments(
        [*SIZES, *MODELS[m], f"dtype={dtype}", f"ac={ac}", f"model.dropout={0.1 if a == 'math' else 0.0}"]
        for m, dtype, ac, a in points
    )
    return ((m, a, experiment) for (m, _, _, a), experiment in zip(points, chosen, strict=True))


def _measure(allocator: CountingAllocator, model: str, attention: str, experiment: Experiment) -> Row:
    source = source_of(experiment.model, experiment.data, sequence_length=experiment.sequence_length)
    batch = source.batch(step=0, batch_size=experiment.batch_size, seed=experiment.seed)
    with _attention(attention):
        trainee = assemble(experiment, torch.device("cpu"), None, batch)
        _train(trainee, batch)
        report = instrument(trainee, batch, is_host=allocating_on_host)
        truth = allocator_truth(trainee, batch, report.live)
        probed = instrument(trainee, batch, is_host=allocating_on_host, probe=CpuWorkspaceProbe(allocator))
    assert truth is not None, "the counting allocator is installed"
    assert probed.workspaces is not None, "there was a probe"
    return Row(
        model=model,
        ac=name_of(experiment.ac),
        dtype=experiment.dtype,
        attention=attention,
        peak_phase=report.memory.peak_phase,
        live_peak_bytes=report.live.peak_bytes,
        allocator_peak_bytes=truth.peak_requested_bytes,
        workspace_bytes=truth.workspace_bytes or 0,
        unexplained_bytes=truth.peak_requested_bytes - probed.workspaces.peak_bytes,
        workspaces=probed.workspaces.largest_by_op,
    )


def _attention(name: str) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH) if name == "math" else nullcontext()


def _train(trainee: Assembled, batch: Batch) -> None:
    trainee.zero_grad()
    _, loss = trainee.forward(batch)
    trainee.backward(loss)
    trainee.update()


def _table(rows: list[Row]) -> Table:
    table = Table(title="Live storages against the CPU allocator, peak bytes of one step")
    for heading in ("model", "ac", "dtype", "attention", "peak in"):
        table.add_column(heading)
    for heading in ("live", "allocator", "difference", "unexplained"):
        table.add_column(heading, justify="right")
    table.add_column("operators with memory of their own")
    for row in rows:
        numbers = (row.live_peak_bytes, row.allocator_peak_bytes, row.workspace_bytes, row.unexplained_bytes)
        named = ", ".join(f"{op} {nbytes:,}" for op, nbytes in list(row.workspaces.items())[:3])
        table.add_row(
            row.model, row.ac, row.dtype, row.attention, row.peak_phase, *(f"{n:,}" for n in numbers), named
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
