"""Experiments of the parity matrix, and the proof that each rank of the pool runs on one of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from harness.assemble import Assembled, assemble
from harness.data import Synthetic, source_of
from harness.difference import Parity, describe_difference
from harness.experiment import Experiment
from harness.measure.parity import compare_steps
from harness.measure.snapshot import steps
from harness.mesh import Mesh
from harness.models.base import Batch, ModelSpec
from harness.models.evoformer import EvoformerSpec
from harness.models.gpt import GPTSpec
from harness.models.llama import LlamaSpec
from harness.models.mlp import MLPSpec
from harness.models.moe import MoESpec
from harness.models.unet import UNetSpec
from harness.models.vit import ViTSpec
from harness.parallel import cpu_stands_in_for_cuda, device_mesh, dp_rank
from harness.protocol import Protocol
from strategies import ac_variants, chunk_variants, shard_variants
from strategies.chunk import ChunkPlan

_CPU = torch.device("cpu")
_SIZES: dict[str, Any] = {
    "layers_fqn": "layers",
    "vocab_size": 64,
    "n_layers": 2,
    "width": 32,
    "hidden_width": 64,
}
_ATTENTION: dict[str, Any] = {"n_heads": 4, "max_positions": 32}
_LLAMA: dict[str, Any] = {**_ATTENTION, "n_kv_heads": 2, "rope_theta": 10_000.0}
MODELS: dict[str, ModelSpec] = {
    "gpt": GPTSpec(name="gpt", dropout=0.0, **_SIZES, **_ATTENTION),
    "llama": LlamaSpec(name="llama", dropout=0.0, tied_head=False, **_SIZES, **_LLAMA),
    "moe": MoESpec(name="moe", dropout=0.0, n_experts=4, top_k=2, **_SIZES, **_LLAMA),
    "mlp": MLPSpec(name="mlp", dropout=0.0, **_SIZES),
}
# they draw their own samples, and most have no tensor parallel plan
OF_SAMPLES: dict[str, ModelSpec] = {
    "vit": ViTSpec(
        name="vit", dropout=0.0, layers_fqn="layers", n_layers=2, width=32, n_heads=4, hidden_width=64,
        image_size=8, patch_size=4, n_classes=10,
    ),
    "evoformer": EvoformerSpec(
        name="evoformer", dropout=0.0, layers_fqn="layers", n_layers=2, msa_width=16, msa_heads=2,
        msa_head_width=8, pair_width=8, pair_heads=2, pair_head_width=4, outer_width=4, triangle_width=8,
        transition_factor=2, global_columns=False, n_sequences=3, n_residues=5, n_tokens=23, n_bins=16,
    ),
    "unet": UNetSpec(
        name="unet", dropout=0.0, layers_fqn="layers", width=4, multipliers=(1, 2), n_blocks=1,
        attention_sizes=(4,), head_width=2, n_groups=2, image_size=8,
    ),
}  # fmt: skip
MESHES = {
    "single": Mesh(),
    "ddp2": Mesh(dp_replicate=2),
    "shard2": Mesh(dp_shard=2),
    "tp2": Mesh(tp=2),
    "shard2_tp2": Mesh(dp_shard=2, tp=2),
    "hsdp2x2": Mesh(dp_replicate=2, dp_shard=2),
}


_PLAIN = ac_variants["none"]()
_make_plan = ChunkPlan.make
_plans: dict[str, ChunkPlan] = {}


def experiment(
    *,
    model: str = "gpt",
    mesh: Mesh | None = None,
    variant: str = "full",
    options: dict[str, Any] | None = None,
    chunk: str = "none",
    chunk_options: dict[str, Any] | None = None,
    dropout: float = 0.0,
    parity_steps: int = 3,
    batch_size: int = 4,
    sequence_length: int = 16,
    **recipe: Any,
) -> Experiment:
    """Return one case; `options` are those of the AC variant `variant`."""
    layers = {} if variant == "none" or "module_classes" in (options or {}) else {"layers_fqn": "layers"}
    return Experiment(
        model=replace({**MODELS, **OF_SAMPLES}[model], dropout=dropout),
        mesh=mesh or Mesh(),
        ac=ac_variants[variant](**layers, **(options or {})),
        chunk=chunk_variants[chunk](**(chunk_options or {})),
        shard=shard_variants["none"](),
        data=Synthetic(),
        protocol=Protocol(parity_steps=parity_steps),
        batch_size=batch_size,
        sequence_length=sequence_length,
        **recipe,
    )


def prove(rank: int, case: Experiment, twin: Experiment | None = None) -> list[str]:
    """Return what differs between `case` and its twin on this rank, in words; nothing when they are equal."""
    return differences(parity(rank, case, twin))


def parity(rank: int, case: Experiment, twin: Experiment | None = None) -> Parity:
    """Train `case` and its twin side by side on this rank and compare every step.

    Args:
        rank: this one.
        case: equal within the tolerance that it declares, if any.
        twin: what it equals bit for bit; `None` for its own twin.
    """
    batches = batches_of(rank, case)
    tolerance = case.tolerance if twin is None else None
    with cpu_stands_in_for_cuda(case.mesh, _CPU):
        expected, actual = (
            steps(assembled(each, batches[0]), batches, seed=case.seed, dp_rank=dp_rank(case.mesh, rank))
            for each in (twin or case.twin(), case)
        )
        return compare_steps(
            expected,
            actual,
            count=len(batches),
            rank=rank,
            tolerance=None if tolerance is None else tolerance.relative,
            floor=0.0 if tolerance is None else tolerance.floor,
            stride=2 * case.learning_rate,
        )


def batches_of(rank: int, case: Experiment) -> list[Batch]:
    """Return this rank's share of each parity step's batch."""
    source = source_of(case.model, case.data, sequence_length=case.sequence_length)
    share = {"dp_rank": dp_rank(case.mesh, rank), "dp_size": case.mesh.dp}
    return [
        source.batch(step=step, batch_size=case.batch_size, seed=case.seed, **share)
        for step in range(case.protocol.parity_steps)
    ]


def assembled(case: Experiment, sample: Batch) -> Assembled:
    """Return the model of `case` on its mesh; the process group stands."""
    devices = _devices(replace(case.mesh, cpu_offload=False)) if case.mesh.world_size > 1 else None
    with mock.patch.object(ChunkPlan, "make", partial(_remembered, repr(replace(case, ac=_PLAIN)))):
        return assemble(case, _CPU, devices, sample)


def _remembered(key: str, *arguments: Any, **options: Any) -> ChunkPlan:
    """Return the plan of the case `key`: those that differ in their AC variant have one."""
    if key not in _plans:
        _plans[key] = _make_plan(*arguments, **options)
    return _plans[key]


def differences(found: Parity) -> list[str]:
    """Return the first difference of each part that is not equal."""
    parts = ("outputs", "loss", "gradients", "buffers", "rng_state", "parameters")
    unequal = {part: getattr(found, part) for part in parts if not getattr(found, part).equal}
    return [describe_difference(part, each.first_difference) for part, each in unequal.items()]


@cache  # process groups are made once a rank, not once a case
def _devices(mesh: Mesh) -> DeviceMesh | None:
    return device_mesh(mesh, torch.device("cpu"))
