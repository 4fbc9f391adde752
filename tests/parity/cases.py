"""Experiments of the parity matrix, and the proof that each rank of the pool runs on one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.experiment.data import Synthetic
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Coordinate, Mesh
from harness.experiment.protocol import Protocol
from harness.measure.parity.snapshot import Snapshot
from harness.measure.step import instrument
from harness.models.base import Batch, ModelSpec
from harness.models.evoformer import EvoformerSpec
from harness.models.gpt import GPTSpec
from harness.models.hf import HFSpec
from harness.models.llama import LlamaSpec
from harness.models.mlp import MLPSpec
from harness.models.moe import MoESpec
from harness.models.unet import UNetSpec
from harness.models.vit import ViTSpec
from harness.records.measured import MeasuredMemory, MeasuredWork
from harness.records.parity_result import Parity
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.build import Build
from harness.trial.links import Link
from harness.trial.parallel import cpu_stands_in_for_cuda, device_mesh, mean_over_context
from harness.trial.plan_budget import PLAN_FILE, with_plan
from harness.trial.plan_sharding import plan_sharding
from harness.trial.proof import Prover
from harness.trial.steps import UNMEASURED_STEPS, warm_up
from strategies import ac_variants, chunk_variants, shard_variants
from strategies.chunk import ChunkPlan
from strategies.shard.model.shard_plan import ShardPlan
from tests.counted_collectives import Collectives, Counts, promised

T = TypeVar("T")
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
_GROUPED = {"intermediate_size": 64, "num_key_value_heads": 2}
_VISITED = {"num_experts_per_tok": 2}
# its class, from the library, is imported where it runs
OF_TRANSFORMERS: dict[str, ModelSpec] = {
    name: HFSpec(
        name=name, dropout=dropout, layers_fqn=layers, vocab_size=64, n_layers=2, width=32, n_heads=4,
        config_class=config_class, overrides=overrides,
    )
    for name, config_class, layers, dropout, overrides in [
        ("hf_llama", "LlamaConfig", "model.layers", None, _GROUPED),
        ("hf_qwen3", "Qwen3Config", "model.layers", None, {**_GROUPED, "head_dim": 8}),
        ("hf_gpt2", "GPT2Config", "transformer.h", 0.1, {"n_inner": 64}),
        ("hf_olmoe", "OlmoeConfig", "model.layers", None,
         {"num_experts": 4, **_VISITED, "intermediate_size": 64}),
        ("hf_mixtral", "MixtralConfig", "model.layers", None,
         {"num_local_experts": 4, **_VISITED, **_GROUPED}),
        ("hf_qwen3_moe", "Qwen3MoeConfig", "model.layers", None,
         {"num_experts": 4, **_VISITED, "moe_intermediate_size": 16}),
        ("hf_gpt_oss", "GptOssConfig", "model.layers", None,
         {"num_local_experts": 4, **_VISITED, "intermediate_size": 32, "head_dim": 8}),
        ("hf_deepseek_v3", "DeepseekV3Config", "model.layers", None,
         {"n_routed_experts": 4, **_VISITED, "n_group": 2, "topk_group": 2, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 8, "v_head_dim": 8}),
    ]
}  # fmt: skip
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
    "sp_tp2": Mesh(tp=2, sp=True),
    "sp_tp2_loss": Mesh(tp=2, sp=True, loss_parallel=True),
    "tp2_loss": Mesh(tp=2, loss_parallel=True),
    "cp2_gather": Mesh(cp=2),
    "cp2_ring": Mesh(cp=2, cp_method="ring"),
    "cp2_ulysses": Mesh(cp=2, cp_method="ulysses"),
    "shard2_cp2": Mesh(dp_shard=2, cp=2),
    "ddp2_cp2": Mesh(dp_replicate=2, cp=2),
    "cp4_ring": Mesh(cp=4, cp_method="ring"),
    "ep2": Mesh(dp_shard=2, ep=2),
    "ep2_capacity": Mesh(dp_shard=2, ep=2, ep_capacity=0.75),
    "ep4": Mesh(dp_shard=4, ep=4),
    "shard4_ep2": Mesh(dp_shard=4, ep=2),
    "hsdp2x2_ep2": Mesh(dp_replicate=2, dp_shard=2, ep=2),
    "cp2_ep2": Mesh(cp=2, ep=2),
    "shard2_cp2_ep4": Mesh(dp_shard=2, cp=2, ep=4),
    "cp2_sp_tp2": Mesh(cp=2, tp=2, sp=True),
    "shard2_sp_tp2": Mesh(dp_shard=2, tp=2, sp=True),
    "shard2_tp2": Mesh(dp_shard=2, tp=2),
    "hsdp2x2": Mesh(dp_replicate=2, dp_shard=2),
    "ddp2_tp2": Mesh(dp_replicate=2, tp=2),
}


def in_stages(mesh: Mesh, schedule: str) -> Mesh:
    """Return two ranks of stages, each on such a mesh; FSDP keeps weights whole, as some schedules ask."""
    return replace(mesh, pp=2, pp_schedule=schedule, reshard_after_forward=not mesh.is_sharded)


def of_four_blocks(case: Experiment) -> Experiment:
    """Return a case whose model has as many blocks as the schedules have stages on two ranks."""
    return replace(case, model=replace(case.model, n_layers=4))  # type: ignore[call-arg]  # of transformers


_make_plan = ChunkPlan.make
_chunk_plans: dict[str, ChunkPlan] = {}
_sharding_plans: dict[str, ShardPlan | None] = {}
_against_dense: dict[str, Parity | None] = {}
_steps: dict[str, list[Snapshot]] = {}
"""Steps of models that neither recompute nor chunk nor are sharded by a plan: twins of many cases."""


_ASKED: dict[str, dict[str, Any]] = {"budget": {"fraction": 0.9999}}
"""What a variant has no default for."""


def experiment(
    *,
    model: str = "gpt",
    mesh: Mesh | None = None,
    variant: str = "full",
    options: dict[str, Any] | None = None,
    shard: str = "none",
    sharding: dict[str, Any] | None = None,
    chunk: str = "none",
    chunk_options: dict[str, Any] | None = None,
    dropout: float = 0.0,
    parity_steps: int = 3,
    batch_size: int = 4,
    sequence_length: int = 16,
    **recipe: Any,
) -> Experiment:
    """Return one case; `options` are the AC variant's, `sharding` and `chunk_options` those of the others."""
    options = {**_ASKED.get(variant, {}), **(options or {})}
    spec = {**MODELS, **OF_TRANSFORMERS, **OF_SAMPLES}[model]
    is_named = variant in {"none", "file", "python"} or "module_classes" in options
    layers = {} if is_named else {"layers_fqn": spec.layers_fqn}
    return Experiment(
        model=spec if model in OF_TRANSFORMERS else replace(spec, dropout=dropout),
        mesh=mesh or Mesh(),
        ac=ac_variants[variant](**layers, **options),
        chunk=chunk_variants[chunk](**(chunk_options or {})),
        shard=shard_variants[shard](**(sharding or {})),
        data=Synthetic(),
        protocol=Protocol(parity_steps=parity_steps),
        batch_size=batch_size,
        sequence_length=sequence_length,
        **recipe,
    )


def prove(rank: int, case: Experiment, twin: Experiment | None = None) -> list[str]:
    """Return what differs between `case` and its twin on this rank, in words; nothing when they are equal."""
    return differences(parity(rank, case, twin))


def require_neutral(found: list[Parity]) -> None:
    """See that all ranks found the variant bitwise neutral, and its twin equal to the dense model."""
    for parity in found:
        assert list(parity.differences()) == []
        assert parity.level == "bitwise"
        assert parity.chain[-1].compared is not None
        assert parity.chain[-1].compared.baseline == "the dense model"
        assert parity.chain[-1].outputs.max_rel < 1e-5


def parity(rank: int, case: Experiment, twin: Experiment | None = None) -> Parity:
    """Train `case` and what it is proven against side by side on this rank and compare every step.

    Args:
        rank: this one.
        case: equal within the tolerance that it declares, if any.
        twin: what it equals bit for bit; `None` for all that a trial is compared with.
    """
    data_rank = case.mesh.data_rank(rank)
    batch = batches(case, _CPU, data_rank)
    sample = batch(0).parts()[0]
    with cpu_stands_in_for_cuda(case.mesh, _CPU), _shared_folder() as folder:
        sample = batch(0).parts()[0]
        plan = sharding_plan(case, sample)
        make = partial(assembled, sample=sample, sharding=plan)
        case = with_plan(case, make, batch, folder / PLAN_FILE, device=_CPU, rank=rank)
        prover = _Prover(
            assembled=lambda each: assembled(each, sample, plan, planned_for=case),
            dense=lambda each: assembled(each, sample, is_dense=True),
            once=_once,
            batch=batch,
            whole_batch=batches(case.dense(), _CPU, data_rank // case.mesh.cp),
            averaged=partial(mean_over_context, devices_of(case.mesh), case.mesh),
            rank=rank,
            dp_rank=data_rank,
        )
        if twin is None:
            return prover.prove(case)
        steps = case.protocol.parity_steps
        return prover.compare(Link(variant=case, baseline=twin, steps=steps, tolerance=None, whole=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prover(Prover):
    """Trains the plain model once for all cases that have it as their baseline."""

    def _baseline(self, link: Link) -> Iterator[Snapshot]:
        fresh = Prover._baseline(self, link)
        if link.baseline.is_sharded or link.baseline != link.baseline.plain():
            return fresh
        key = repr((_without_order(link.baseline), link.steps, link.whole, link.is_dense))
        if key not in _steps:
            _steps[key] = list(fresh)
        return iter(_steps[key])


def _once(link: Link, compare: Callable[[], Parity | None]) -> Parity | None:
    """Compare with a dense model once for all cases that share it."""
    key = repr(link)
    if key not in _against_dense:
        _against_dense[key] = compare()
    return _against_dense[key]


@contextmanager
def forgotten() -> Iterator[None]:
    """Let cases inside the scope take no step from cases before it, and leave none to those after it."""
    with mock.patch.dict(_steps, clear=True), mock.patch.dict(_against_dense, clear=True):
        yield


def sharding_plan(case: Experiment, sample: Batch) -> ShardPlan | None:
    """Return what the sharding variant of `case` does with a rank's batch, planned once by rank 0."""
    key = repr(_without_order(replace(case.plain(), protocol=Protocol())))
    if key not in _sharding_plans:
        _sharding_plans[key] = _of_rank_0(lambda: plan_sharding(case, sample.inputs, _CPU))
    return _sharding_plans[key]


def _without_order(plain: Experiment) -> Experiment:
    """Return an experiment without AC, for which it makes no difference where AC would stand."""
    return replace(plain, wrap_order="inside_fsdp")


def assembled(
    case: Experiment,
    sample: Batch,
    sharding: ShardPlan | None = None,
    *,
    planned_for: Experiment | None = None,
    is_dense: bool = False,
) -> Assembled:
    """Return the model of `case` on its mesh; the process group stands.

    Args:
        case: what to assemble.
        sample: a batch of one rank.
        sharding: what its sharding variant shall do.
        planned_for: the case whose chunks it has, if any; they depend on AC.
        is_dense: each rank of `tp` computes the whole model.
    """
    with mock.patch.object(ChunkPlan, "make", partial(_remembered, repr(planned_for or case))):
        build = None if sharding is None else Build(sharding=sharding)
        return assemble(case, _CPU, devices_of(case.mesh), sample, build=build, is_dense=is_dense)


def _remembered(key: str, *arguments: Any, **options: Any) -> ChunkPlan:
    """Return the plan of the case `key`, made once by one rank: it depends on shapes alone."""
    if key not in _chunk_plans:
        _chunk_plans[key] = _of_rank_0(lambda: _make_plan(*arguments, **options))
    return _chunk_plans[key]


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Lend a folder that all ranks share, until the last of them has left it."""
    with TemporaryDirectory() as folder:
        yield Path(_of_rank_0(lambda: folder))
        if dist.is_initialized():
            dist.barrier()


def _of_rank_0(make: Callable[[], T]) -> T:
    if not dist.is_initialized():
        return make()
    held: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    found: T = held[0]
    return found


def all_reduces(rank: int, case: Experiment) -> tuple[Counts, Counts]:
    """Return the all-reduces that the plan of `case` promises, and those of a step; FSDP has none."""
    batch = batches(case, _CPU, case.mesh.data_rank(rank))(0)
    plan = sharding_plan(case, batch)
    assert plan is not None
    trainee = assemble(case, _CPU, devices_of(case.mesh), batch, build=Build(sharding=plan))
    with Collectives() as counter:
        trainee.backward(trainee.forward(batch)[1])
    found = (promised(plan.collectives), counter.counts)
    ours, theirs = (Counter({key: n for key, n in each.items() if key[1] == "all_reduce"}) for each in found)
    return ours, theirs


def measured(rank: int, case: Experiment) -> tuple[MeasuredMemory, MeasuredWork]:
    """Return memory and work of a step of `case` on this rank, as a trial measures them."""
    batch = batches(case, _CPU, case.mesh.data_rank(rank))
    trainee = assembled(case, batch(0).parts()[0])
    warm_up(trainee, batch)
    report = instrument(trainee, batch(UNMEASURED_STEPS))
    return report.memory, report.work


def threads_of(_rank: int) -> int:
    """Return how many threads this rank has."""
    return len(list(Path("/proc/self/task").iterdir()))


def batches_of(rank: int, case: Experiment) -> list[Batch]:
    """Return this rank's share of each parity step's batch."""
    return list(map(batches(case, _CPU, case.mesh.data_rank(rank)), range(case.protocol.parity_steps)))


def differences(found: Parity) -> list[str]:
    """Return the first difference of each part that is not equal."""
    return list(found.differences())


def devices_of(mesh: Mesh) -> DeviceMesh | None:
    """Return the device mesh of `mesh`, made once; the process group stands."""
    sizes = {name: getattr(mesh, name) for name in (*Coordinate._fields, "ep")}
    return _devices_of(Mesh(**sizes))


@cache  # a rank makes process groups, which have threads, once for each shape
def _devices_of(mesh: Mesh) -> DeviceMesh | None:
    return device_mesh(mesh, torch.device("cpu"))
