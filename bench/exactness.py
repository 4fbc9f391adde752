"""Two meters of memory on one step: live storages against the counting CPU allocator, to the byte.

Every AC variant on every model, with math attention and with the CPU's flash kernel, in fp32 and bf16. Where
the allocator's peak is higher, kernels hold memory of their own; a third run watches each operator and names
them. `unexplained` is what is left then, and should be 0 everywhere.

    python -m bench.exactness --out outputs/bench/exactness.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from harness.assemble import Assembled, assemble
from harness.experiment import Experiment, name_of
from harness.measure.allocator import CpuWorkspaceProbe
from harness.measure.counting import CountingAllocator, counting_allocator
from harness.measure.step import allocator_truth, instrument
from harness.models.base import Batch
from harness.schema import experiment_fields, materialise
from strategies import ac_variants
from strategies.host import allocating_on_host

MODELS = ("mlp", "gpt_nano", "llama_nano", "moe_nano", "hf")
DTYPES = ("fp32", "bf16")
ATTENTIONS = ("math", "fused")
BATCH_SIZE = 4
SEQUENCE_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Both meters on one step.

    Fields:
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
    rows = [_measure(allocator, experiment, attention) for experiment, attention in _points(arguments.models)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", "utf-8")
    Console(width=None if sys.stdout.isatty() else 200).print(_table(rows))
    print(arguments.out)
    return int(any(row.unexplained_bytes for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/exactness.json"))
    parser.add_argument("--models", nargs="+", default=MODELS)
    return parser.parse_args()


def _points(models: list[str]) -> Iterator[tuple[Experiment, str]]:
    conf = Path(harness.__file__).parents[1] / "conf"
    with initialize_config_dir(str(conf), version_base="1.3"):
        for model, dtype, ac, attention in product(models, DTYPES, ac_variants, ATTENTIONS):
            overrides = [
                f"model={model}",
                f"ac={ac}",
                f"dtype={dtype}",
                "data=synthetic",
                "model.dropout=0.1",
            ]
            if attention == "fused":
                overrides[-1] = "model.dropout=0.0"  # the CPU's flash kernel has no dropout
            config = compose(
                "config", [*overrides, f"batch_size={BATCH_SIZE}", f"sequence_length={SEQUENCE_LENGTH}"]
            )
            yield materialise(experiment_fields(config)), attention


def _measure(allocator: CountingAllocator, experiment: Experiment, attention: str) -> Row:
    source = experiment.data.source(
        vocab_size=experiment.model.vocab_size, sequence_length=experiment.sequence_length
    )
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
        model=experiment.model.name,
        ac=name_of(experiment.ac),
        dtype=experiment.dtype,
        attention=attention,
        live_peak_bytes=report.live.peak_bytes,
        allocator_peak_bytes=truth.peak_requested_bytes,
        workspace_bytes=truth.workspace_bytes,
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
    for heading in ("model", "ac", "dtype", "attention"):
        table.add_column(heading)
    for heading in ("live", "allocator", "difference", "unexplained"):
        table.add_column(heading, justify="right")
    table.add_column("operators with memory of their own")
    for row in rows:
        numbers = (row.live_peak_bytes, row.allocator_peak_bytes, row.workspace_bytes, row.unexplained_bytes)
        named = ", ".join(f"{op} {nbytes:,}" for op, nbytes in list(row.workspaces.items())[:3])
        table.add_row(row.model, row.ac, row.dtype, row.attention, *(f"{n:,}" for n in numbers), named)
    return table


if __name__ == "__main__":
    sys.exit(main())
