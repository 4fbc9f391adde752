"""Two meters of memory on one step: live storages against the bytes requested from the allocator.

The allocator is the counting CPU allocator, or torch's caching allocator on a GPU. Every AC variant runs on
every model, with math and with fused attention, in fp32 and bf16. Where the allocator's peak is higher,
kernels hold memory of their own; a third run watches each operator and names them. `unexplained` is what is
left then, and should be 0. With few tokens the peak lies in the optimizer; batch normalisation has a kernel
whose memory raises the peak in fp32.

`offload` on a GPU may differ: its copies run on a stream of their own, and the allocator counts a block that
another stream has used until it has seen that stream's event, after the last storage on it is gone
(`free_block` in c10/cuda/CUDACachingAllocator.cpp). Its row is for information.

    python -m bench.exactness --models mlp batch_norm
    python -m bench.exactness --device cuda --models gpt_nano
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import UNBUDGETED, experiments
from harness.experiment.data import source_of
from harness.experiment.experiment import Experiment, name_of
from harness.measure.memory.allocator import CpuWorkspaceProbe
from harness.measure.memory.counting_allocator import counting_allocator
from harness.measure.step import allocator_truth, instrument
from harness.models.base import Batch
from harness.trial.assemble import Assembled, assemble
from strategies.step.live_storages import WorkspaceProbe

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
CUDA_MODELS = ("mlp", "gpt_nano", "llama_nano", "moe_nano")
"""Models of a run on a GPU that names none."""
DTYPES = ("fp32", "bf16")
ATTENTIONS = ("math", "fused")
SIZES = ("data=synthetic", "batch_size=4", f"sequence_length={SEQUENCE_LENGTH}")


INEXACT = {"cpu": frozenset[str](), "cuda": frozenset({"offload"})}
"""Variants whose freed blocks the allocator of a device still counts for a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetersOfStep:
    """Both meters on one step.

    Fields:
        peak_phase: where the peak of live storages lies.
        live_peak_bytes: by definition; on CPU with copies to the host, which its allocator cannot tell apart.
        allocator_peak_bytes: requested from the allocator.
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


class CudaWorkspaceProbe:
    """Tells an operator's private memory from the caching allocator's numbers."""

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
    new_probe = _probes(arguments.device)
    torch.set_num_threads(1)
    rows = [_measure(new_probe(), *point) for point in _points(arguments.models, arguments.device)]
    publish(
        _table(rows, arguments.device),
        arguments.out,
        protocol={
            "overrides": (*SIZES, f"mesh.device={arguments.device}"),
            "models": {name: MODELS[name] for name in arguments.models},
        },
        results=[asdict(row) for row in rows],
        device=arguments.device,
    )
    return int(any(row.unexplained_bytes and row.ac not in INEXACT[arguments.device] for row in rows))


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
    made.add_argument("--device", choices=INEXACT, default="cpu")
    made.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL")
    found = made.parse_args()
    found.models = found.models or list(CUDA_MODELS if found.device == "cuda" else MODELS)
    return found


def _probes(device: str) -> Callable[[], WorkspaceProbe]:
    """Return what makes a probe of the device's allocator; leave where there is no such allocator."""
    if device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("bench.exactness --device cuda needs a CUDA device, and this torch sees none")
        return CudaWorkspaceProbe
    allocator = counting_allocator()
    if allocator is None or not allocator.install():
        sys.exit("bench.exactness needs a C++ compiler (g++, or the one that CXX names)")
    return partial(CpuWorkspaceProbe, allocator)


def _points(models: list[str], device: str) -> Iterator[tuple[str, str, Experiment]]:
    """Return model, attention and experiment of each row; the CPU's fused kernel has no dropout."""
    points = list(product(models, DTYPES, UNBUDGETED, ATTENTIONS))
    without_dropout = {"fused"} if device == "cpu" else set()
    chosen = experiments(
        [
            *SIZES,
            *MODELS[model],
            f"mesh.device={device}",
            f"dtype={dtype}",
            f"ac={ac}",
            f"model.dropout={0.0 if attention in without_dropout else 0.1}",
        ]
        for model, dtype, ac, attention in points
    )
    return ((m, a, experiment) for (m, _, _, a), experiment in zip(points, chosen, strict=True))


def _measure(probe: WorkspaceProbe, model: str, attention: str, experiment: Experiment) -> MetersOfStep:
    is_cuda = experiment.mesh.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    source = source_of(experiment.model, experiment.data, sequence_length=experiment.sequence_length)
    batch = source.batch(step=0, batch_size=experiment.batch_size, seed=experiment.seed).to(device)
    with _attention(attention):
        trainee = assemble(experiment, device, None, batch)
        _train(trainee, batch)
        report = instrument(trainee, batch)
        truth = allocator_truth(trainee, batch, report.live)
        probed = instrument(trainee, batch, probe=probe)
    assert truth is not None, "the device has an allocator that counts"
    assert probed.workspaces is not None, "there was a probe"
    return MetersOfStep(
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
    """Take the step in which libraries and the optimizer allocate what stays."""
    trainee.zero_grad()
    _, loss = trainee.forward(batch)
    trainee.backward(loss)
    trainee.update()


def _requested(when: str) -> int:
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["requested_bytes"]["all"][when])


def _table(rows: list[MetersOfStep], device: str) -> Table:
    return table_of(
        rows,
        {
            "model": "model",
            "ac": "ac",
            "dtype": "dtype",
            "attention": "attention",
            "peak in": "peak_phase",
            "live": "live_peak_bytes:,",
            "allocator": "allocator_peak_bytes:,",
            "difference": "workspace_bytes:,",
            "unexplained": "unexplained_bytes:,",
            "operators with memory of their own": lambda row: ", ".join(
                f"{op} {nbytes:,}" for op, nbytes in list(row.workspaces.items())[:3]
            ),
        },
        title=f"Live storages against the allocator of {device}, peak bytes of one step",
    )


if __name__ == "__main__":
    sys.exit(main())
