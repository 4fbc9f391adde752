"""Two meters of memory on one step on a GPU: live storages against the caching allocator's requested bytes.

Every AC variant on every model, with math and with fused attention, in fp32 and bf16. Where the allocator's
peak is higher, kernels hold memory of their own; a third run watches each operator and names them.
`unexplained` is what is left then, and should be 0.

Except for `offload`: its copies run on a stream of their own, and the allocator counts a block that another
stream has used until it has seen that stream's event, after the last storage on it is gone (`free_block` in
c10/cuda/CUDACachingAllocator.cpp). Its row is for information.

    python -m bench.exactness_cuda --models gpt_nano llama_nano
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product

import torch
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.output import parser, publish
from bench.trials import experiments
from harness.experiment.data import source_of
from harness.experiment.experiment import Experiment, name_of
from harness.measure.step import allocator_truth, instrument
from harness.models.base import Batch
from harness.trial.assemble import Assembled, assemble
from strategies import ac_variants
from strategies.regions.host import allocating_on_host

MODELS = ("mlp", "gpt_nano", "llama_nano", "moe_nano")
DTYPES = ("fp32", "bf16")
ATTENTIONS = ("math", "fused")
SIZES = ("data=synthetic", "model.dropout=0.1", "batch_size=4", "sequence_length=64", "mesh.device=cuda")
DEFERRED = frozenset({"offload"})
"""Variants whose freed blocks the allocator still counts for a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Both meters on one step.

    Fields:
        live_peak_bytes: by definition, on the device.
        allocator_peak_bytes: requested from the allocator.
        unexplained_bytes: what is left of the difference when the operators' own memory is added.
        workspaces: operators that hold memory of their own, with the most that one call held.
    """

    model: str
    ac: str
    dtype: str
    attention: str
    live_peak_bytes: int
    allocator_peak_bytes: int
    unexplained_bytes: int
    workspaces: dict[str, int]

    @property
    def is_exact(self) -> bool:
        """Whether no byte is left, where that can be asked for."""
        return self.unexplained_bytes == 0 or self.ac in DEFERRED


class CudaWorkspaceProbe:
    """Tells an operator's private memory from the caching allocator; see `memory.WorkspaceProbe`."""

    def __init__(self) -> None:
        self._before_bytes = 0

    def begin(self) -> None:
        """Start to watch."""
        torch.cuda.reset_peak_memory_stats()
        self._before_bytes = _requested("current")

    def excess_bytes(self) -> int:
        """Return the bytes that were requested above both what was there at `begin` and what is there now."""
        return _requested("peak") - max(self._before_bytes, _requested("current"))


def main() -> int:
    """Measure, print the table, write the JSON; return 1 if a byte is left unexplained."""
    arguments = _arguments()
    if not torch.cuda.is_available():
        sys.exit("bench.exactness_cuda needs a CUDA device, and this torch sees none; use bench.exactness")
    rows = [_measure(experiment, attention) for experiment, attention in _points(arguments.models)]
    publish(
        _table(rows),
        arguments.out,
        protocol={"overrides": SIZES, "models": arguments.models},
        results=[asdict(row) for row in rows],
        device="cuda",
    )
    return int(not all(row.is_exact for row in rows))


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "exactness_cuda")
    made.add_argument("--models", nargs="+", default=MODELS)
    return made.parse_args()


def _points(models: list[str]) -> Iterator[tuple[Experiment, str]]:
    points = list(product(models, DTYPES, ac_variants, ATTENTIONS))
    chosen = experiments([f"model={m}", f"dtype={dtype}", f"ac={ac}", *SIZES] for m, dtype, ac, _ in points)
    return zip(chosen, (attention for *_, attention in points), strict=True)


def _measure(experiment: Experiment, attention: str) -> Row:
    device = torch.device("cuda", torch.cuda.current_device())
    source = source_of(experiment.model, experiment.data, sequence_length=experiment.sequence_length)
    batch = source.batch(step=0, batch_size=experiment.batch_size, seed=experiment.seed).to(device)
    with _attention(attention):
        trainee = assemble(experiment, device, None, batch)
        _train(trainee, batch)
        report = instrument(trainee, batch, is_host=allocating_on_host)
        truth = allocator_truth(trainee, batch, report.live)
        probed = instrument(trainee, batch, is_host=allocating_on_host, probe=CudaWorkspaceProbe())
    assert truth is not None, "CUDA has an allocator"
    assert probed.workspaces is not None, "there was a probe"
    return Row(
        model=experiment.model.name,
        ac=name_of(experiment.ac),
        dtype=experiment.dtype,
        attention=attention,
        live_peak_bytes=report.live.peak_bytes,
        allocator_peak_bytes=truth.peak_requested_bytes,
        unexplained_bytes=truth.peak_requested_bytes - probed.workspaces.peak_bytes,
        workspaces=probed.workspaces.largest_by_op,
    )


def _attention(name: str) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH) if name == "math" else nullcontext()


def _train(trainee: Assembled, batch: Batch) -> None:
    """Take the step in which cuBLAS and the optimizer make what stays."""
    trainee.zero_grad()
    _, loss = trainee.forward(batch)
    trainee.backward(loss)
    trainee.update()


def _requested(when: str) -> int:
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["requested_bytes"]["all"][when])


def _table(rows: list[Row]) -> Table:
    table = Table(title="Live storages against the CUDA caching allocator, peak bytes of one step")
    for heading in ("model", "ac", "dtype", "attention"):
        table.add_column(heading)
    for heading in ("live", "requested", "unexplained"):
        table.add_column(heading, justify="right")
    table.add_column("operators with memory of their own")
    for row in rows:
        numbers = (row.live_peak_bytes, row.allocator_peak_bytes, row.unexplained_bytes)
        named = ", ".join(f"{op} {nbytes:,}" for op, nbytes in list(row.workspaces.items())[:2])
        table.add_row(row.model, row.ac, row.dtype, row.attention, *(f"{n:,}" for n in numbers), named)
    return table


if __name__ == "__main__":
    sys.exit(main())
