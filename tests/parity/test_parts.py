"""Residuals in parts of the sequence, and logits in parts of the vocabulary, under every variant."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from harness.models.llama import LlamaSpec
from harness.predict.prediction import step_of
from harness.records.measured import StepBytes
from tests.parity import cases
from tests.rank_pool import RankPool

_COMM = {"save_ops": ("matmul", "attention", "comm")}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "full": ("full", {}),
    "nested": ("nested", {}),
    "selective_layer": ("selective_layer", {"ac_freq": 2}),
    "selective_op": ("selective_op", {}),
    "selective_op with comm": ("selective_op", _COMM),
    "offload": ("offload", {}),
}

_MATRIX = pytest.mark.matrix
# of four blocks, forward and backward: one for each end of attention and feed-forward in either direction,
# and those of embedding and head
_COLLECTIVES = [
    pytest.param("none", 19, 18, {}, id="none", marks=_MATRIX),
    pytest.param("full", 19, 30, {"all_gather": 8, "reduce_scatter": 4}, id="full"),
    pytest.param("nested", 19, 38, {"all_gather": 12, "reduce_scatter": 8}, id="nested", marks=_MATRIX),
    pytest.param(
        "selective_layer", 19, 24, {"all_gather": 4, "reduce_scatter": 2}, id="layers", marks=_MATRIX
    ),
    pytest.param(
        "selective_op", 19, 30, {"all_gather": 8, "reduce_scatter": 4}, id="products", marks=_MATRIX
    ),
    pytest.param("selective_op with comm", 19, 18, {}, id="collectives saved"),
    pytest.param("offload", 19, 18, {}, id="offload", marks=_MATRIX),
]


@pytest.mark.parametrize(("variant", "forward", "backward", "repeated"), _COLLECTIVES)
def test_collectives_of_parts_of_the_sequence(
    pool2: RankPool, variant: str, forward: int, backward: int, repeated: dict[str, int]
) -> None:
    name, options = _VARIANTS[variant]
    case = cases.experiment(model="llama", mesh=cases.MESHES["sp_tp2"], variant=name, options=options)
    assert isinstance(case.model, LlamaSpec)
    case = replace(case, model=replace(case.model, n_layers=4))
    predicted = step_of(case)
    for memory, work in pool2.run(cases.measured, case):
        for part in dataclasses.fields(StepBytes):
            assert getattr(memory, part.name) == getattr(predicted.memory, part.name)
        counts = {phase: sum(by_name.values()) for phase, by_name in work.collectives.items()}
        assert (counts["forward"], counts["backward"]) == (forward, backward)
        assert work.collectives_repeated == repeated
        assert (work.collectives, work.collective_bytes) == (
            predicted.work.collectives,
            predicted.work.collective_bytes,
        )


@pytest.mark.parametrize(
    ("mesh", "model", "variant"),
    [
        *(
            pytest.param("sp_tp2", "llama", variant, id=f"sequence, {variant}", marks=_MATRIX)
            for variant in _VARIANTS
        ),
        pytest.param("sp_tp2", "gpt", "full", id="sequence, a tied head"),
        pytest.param("sp_tp2_loss", "hf_llama", "full", id="both, transformers"),
        *(
            pytest.param(mesh, model, variant, id=f"{mesh}, {model}, {variant}", marks=_MATRIX)
            for mesh, model in [("sp_tp2", "hf_llama"), ("sp_tp2", "hf_qwen3"), ("tp2_loss", "hf_llama")]
            for variant in _VARIANTS
        ),
        pytest.param("tp2_loss", "llama", "full", id="logits", marks=_MATRIX),
        pytest.param("sp_tp2_loss", "llama", "nested", id="both"),
    ],
)
def test_parts_are_neutral_and_equal_the_dense_model(
    pool2: RankPool, mesh: str, model: str, variant: str
) -> None:
    name, options = _VARIANTS[variant]
    case = cases.experiment(
        model=model, mesh=cases.MESHES[mesh], variant=name, options=options, dropout=0.1, parity_steps=2
    )
    for parity in pool2.run(cases.parity, case):
        assert list(parity.differences()) == []
        assert parity.level == "bitwise"
        assert parity.chain[-1].compared is not None
        assert parity.chain[-1].compared.baseline == "the dense model"
        assert parity.chain[-1].outputs.max_rel < 1e-5


@pytest.mark.matrix
def test_parts_under_fsdp(pool4: RankPool) -> None:
    case = cases.experiment(model="llama", mesh=cases.MESHES["shard2_sp_tp2"], parity_steps=2)
    assert pool4.run(cases.prove, case) == [[]] * 4
