"""Experiments of the parity matrix, and the proof that each rank of the pool runs on one of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from harness.assemble import assemble
from harness.data import Synthetic, source_of
from harness.difference import Parity, describe_difference
from harness.experiment import Experiment
from harness.measure.parity import compare_steps
from harness.measure.snapshot import steps
from harness.mesh import Mesh
from harness.models.base import ModelSpec
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


def experiment(
    *,
    model: str = "gpt",
    mesh: Mesh | None = None,
    variant: str = "full",
    options: dict[str, Any] | None = None,
    dropout: float = 0.0,
    parity_steps: int = 3,
    **recipe: Any,
) -> Experiment:
    """Return one case; `options` are the variant's."""
    layers = {} if variant == "none" or "module_classes" in (options or {}) else {"layers_fqn": "layers"}
    return Experiment(
        model=replace({**MODELS, **OF_SAMPLES}[model], dropout=dropout),
        mesh=mesh or Mesh(),
        ac=ac_variants[variant](**layers, **(options or {})),
        chunk=chunk_variants["none"](),
        shard=shard_variants["none"](),
        data=Synthetic(),
        protocol=Protocol(parity_steps=parity_steps),
        batch_size=4,
        sequence_length=16,
        **recipe,
    )


def prove(rank: int, case: Experiment) -> list[str]:
    """Return what differs between `case` and its twin on this rank, in words; nothing when they are equal."""
    return differences(parity(rank, case))


def parity(rank: int, case: Experiment) -> Parity:
    """Train `case` and its twin side by side on this rank and compare every step."""
    device = torch.device("cpu")
    devices = _devices(replace(case.mesh, cpu_offload=False)) if case.mesh.world_size > 1 else None
    source = source_of(case.model, case.data, sequence_length=case.sequence_length)
    share = dp_rank(case.mesh, rank)
    batches = [
        source.batch(
            step=step, batch_size=case.batch_size, seed=case.seed, dp_rank=share, dp_size=case.mesh.dp
        )
        for step in range(case.protocol.parity_steps)
    ]
    with cpu_stands_in_for_cuda(case.mesh, device):
        expected, actual = (
            steps(assemble(each, device, devices, batches[0]), batches, seed=case.seed, dp_rank=share)
            for each in (case.twin(), case)
        )
        return compare_steps(expected, actual, count=len(batches), rank=rank)


def differences(found: Parity) -> list[str]:
    """Return the first difference of each part that is not equal."""
    parts = ("outputs", "loss", "gradients", "buffers", "rng_state", "parameters")
    unequal = {part: getattr(found, part) for part in parts if not getattr(found, part).equal}
    return [describe_difference(part, each.first_difference) for part, each in unequal.items()]


@cache  # process groups are made once a rank, not once a case
def _devices(mesh: Mesh) -> DeviceMesh | None:
    return device_mesh(mesh, torch.device("cpu"))
