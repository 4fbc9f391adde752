"""Torch's own ring of attention, with the CPU's kernel in the place of CUDA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.launchers.local import Local
from harness.models.parts import torch_context
from harness.predict.prediction import step_of
from harness.records.measured import MeasuredMemory, MeasuredWork
from harness.records.parity_result import Parity
from tests.parity import cases
from tests.parity.torch_kernel import errors_of_ring, kernel_of_cpu
from tests.rank_pool import RankPool

_MATRIX = pytest.mark.matrix
_COMM = {"save_ops": ("matmul", "attention", "comm")}


def _case(variant: str = "full", *, mesh: dict[str, Any] | None = None, **options: Any) -> Experiment:
    made = Mesh(**{"cp": 2, "cp_method": "torch", **(mesh or {})})
    return cases.experiment(**{"model": "llama", "parity_steps": 2, **options}, mesh=made, variant=variant)


def _parity(rank: int, case: Experiment) -> Parity:
    with kernel_of_cpu():
        return cases.parity(rank, case)


def _measured(rank: int, case: Experiment) -> tuple[MeasuredMemory, MeasuredWork]:
    with kernel_of_cpu():
        return cases.measured(rank, case)


def _errors(_rank: int, *, is_causal: bool) -> list[float]:
    return errors_of_ring(init_device_mesh("cpu", (2,)), dtype=torch.float32, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all keys"])
def test_parts_attend_as_the_whole(pool2: RankPool, is_causal: bool) -> None:
    for errors in pool2.run(_errors, is_causal=is_causal):
        assert max(errors) < 1e-6


@pytest.mark.parametrize(
    ("model", "variant", "options"),
    [
        pytest.param("llama", "full", {}, id="full"),
        *(
            pytest.param(model, variant, options, id=f"{model}, {variant}{each}", marks=_MATRIX)
            for model in ("llama", "gpt", "moe", "hf_llama", "hf_qwen3")
            for variant, options, each in [
                ("none", {}, ""),
                ("full", {}, ""),
                ("full", {"use_reentrant": True}, ", reentrant"),
                ("selective_layer", {"ac_freq": 2}, ""),
                ("selective_op", {}, ""),
                ("selective_op", _COMM, ", comm"),
                ("nested", {}, ""),
                ("offload", {}, ""),
            ]
        ),
    ],
)
def test_is_neutral_and_equals_the_dense_model(
    pool2: RankPool, model: str, variant: str, options: dict[str, Any]
) -> None:
    cases.require_neutral(pool2.run(_parity, _case(variant, model=model, options=options)))


@_MATRIX
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        pytest.param({"dp_shard": 2}, 1, id="shards"),
        pytest.param({"dp_replicate": 2}, 1, id="replicas"),
        pytest.param({"tp": 2, "sp": True, "loss_parallel": True}, 1, id="parts twice"),
        pytest.param({"pp": 2}, 2, id="stages"),
    ],
)
def test_on_meshes_of_four(pool4: RankPool, mesh: dict[str, Any], microbatches: int) -> None:
    cases.require_neutral(pool4.run(_parity, _case(mesh=mesh, microbatches=microbatches)))


# of two blocks: a gather of keys and values in either direction, and their gradients are passed on twice
_COLLECTIVES = [
    pytest.param("none", {}, {"all_gather": 2, "all_to_all": 4}, {}, id="none"),
    pytest.param("full", {}, {"all_gather": 4, "all_to_all": 4}, {"all_gather": 2}, id="full"),
    pytest.param("selective_op", {}, {"all_gather": 2, "all_to_all": 4}, {}, id="attention saved"),
]


@pytest.mark.parametrize(("variant", "options", "backward", "repeated"), _COLLECTIVES)
def test_collectives(
    pool2: RankPool,
    variant: str,
    options: dict[str, Any],
    backward: dict[str, int],
    repeated: dict[str, int],
) -> None:
    for _, work in pool2.run(_measured, _case(variant, options=options)):
        own = {name: count for name, count in work.collectives["backward"].items() if name != "all_reduce"}
        assert (work.collectives["forward"].get("all_gather"), own) == (2, backward)
        assert work.collectives_repeated == repeated


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        pytest.param(
            lambda: Mesh(cp=2, cp_method="torch", device="cpu"),
            "mesh.cp_method: torch has no rules for kernels of the CPU, got mesh.device=cpu; use gather, "
            "ring or ulysses",
            id="on the CPU",
        ),
        pytest.param(
            lambda: Local().check(Mesh(cp=2, cp_method="torch")),
            "mesh.cp_method: torch has no rules for kernels of the CPU, and torch sees no CUDA device here; "
            "use gather, ring or ulysses",
            id="on a machine without CUDA",
        ),
        pytest.param(
            lambda: torch_context.require_rules("cpu"),
            "mesh.cp_method: torch has rules for kernels of cuda alone, got cpu; use gather, ring or ulysses",
            id="in a rank",
        ),
        pytest.param(
            lambda: _case(dropout=0.1),
            "mesh.cp_method: torch does not suit dropout: its backward drops other weights than forward did; "
            "use gather, ring or ulysses, or no dropout",
            id="dropout",
        ),
        pytest.param(
            lambda: _case(model="vit"),
            "mesh.cp_method: torch does not suit 'vit', whose last part is padded; use gather, ring or "
            "ulysses",
            id="a padded part",
        ),
        pytest.param(
            lambda: _case("budget"),
            "mesh.cp_method: torch does not suit ac=budget: no plan was proven with torch's own ring; use "
            "gather, ring or ulysses",
            id="a plan",
        ),
        pytest.param(
            lambda: step_of(_case()),
            "mesh.cp_method: torch runs kernels of CUDA over parts, and a prediction has those of the CPU; "
            "predict ring, or run the trial, which measures",
            id="a prediction",
        ),
    ],
)
def test_is_refused(refused: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        refused()
    assert str(error.value) == message
