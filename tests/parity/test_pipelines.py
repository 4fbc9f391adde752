"""Pipelines: schedules and variants of AC against the twin on the same mesh, and against the dense model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.models.base import ModelSpec
from harness.models.hf import HFSpec
from harness.models.python import PythonSpec
from harness.predict.prediction import predicted_ranks, step_of
from harness.records.measured import StepBytes
from tests.parity import cases
from tests.rank_pool import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
VARIANTS = ("none", "full", "selective_layer", "selective_op", "nested", "offload")
FEW = {
    ("1f1b", "none"), ("1f1b", "selective_op"), ("gpipe", "nested"), ("interleaved", "offload"),
    ("zero_bubble", "full"), ("zbv", "nested"), ("zbv", "selective_op"),
}  # fmt: skip
"""Cells of the default run: every schedule and most variants once."""
_OPTIONS: dict[str, dict[str, Any]] = {"selective_layer": {"ac_freq": 1}, "budget": {"fraction": 0.9}}


def _case(
    schedule: str, variant: str, *, model: str = "llama", mesh: dict[str, Any] | None = None, **options: Any
) -> Experiment:
    case = cases.experiment(
        model=model,
        mesh=Mesh(**{"pp": 2, "pp_schedule": schedule, **(mesh or {})}),
        variant=variant,
        options=_OPTIONS.get(variant),
        batch_size=8,
        sequence_length=8,
        microbatches=4,
        parity_steps=2,
        **options,
    )
    return replace(case, model=replace(case.model, n_layers=4))  # type: ignore[call-arg]  # of transformers


CELLS = [
    pytest.param(
        schedule, variant, id=f"{variant} on {schedule}",
        marks=[] if (schedule, variant) in FEW else [pytest.mark.matrix],
    )
    for schedule in SCHEDULES
    for variant in VARIANTS
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "variant"), CELLS)
def test_is_equal_to_the_twin_with_dropout_and_to_the_dense_model_without(
    pool2: RankPool, schedule: str, variant: str
) -> None:
    case = _case(schedule, variant, dropout=0.1)
    for rank, parity in enumerate(pool2.run(cases.parity, case)):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level, dense.compared.baseline) == (
            "bitwise",
            "bitwise",
            "the dense model",
        )
        has_last = case.mesh.stages - 1 in case.mesh.stages_of(rank)
        assert bool(parity.losses) == bool(dense.losses) == has_last


_WHOLE = {"dp_shard": 2, "reshard_after_forward": False}
MESHES = [
    # mesh next to the pipeline | schedule | variant; the first row is one of the default run
    pytest.param({"dp_shard": 2}, "1f1b", "full", id="full in FSDP units on 1f1b"),
    *(
        pytest.param(mesh, schedule, variant, id=f"{variant} {words} on {schedule}", marks=pytest.mark.matrix)
        for mesh, words, schedule, variant in [
            ({"dp_shard": 2}, "in FSDP units", "gpipe", "offload"),
            ({"dp_shard": 2}, "in FSDP units", "interleaved", "nested"),
            (_WHOLE, "in FSDP units that stay whole", "gpipe", "selective_op"),
            (_WHOLE, "in FSDP units that stay whole", "zbv", "nested"),
            (_WHOLE, "in FSDP units that stay whole", "zero_bubble", "full"),
            (_WHOLE, "in FSDP units that stay whole", "zero_bubble", "none"),
            ({"dp_replicate": 2}, "below DDP", "interleaved", "full"),
            ({"tp": 2}, "on shards of tensors", "1f1b", "full"),
            ({"tp": 2}, "on shards of tensors", "zero_bubble", "none"),
            *(
                ({"cp": 2, "cp_method": method}, f"on parts of sequences by {method}", schedule, variant)
                for method, schedule, variant in [
                    ("gather", "1f1b", "full"),
                    ("gather", "gpipe", "nested"),
                    ("ring", "1f1b", "full"),
                    ("ring", "gpipe", "selective_op"),
                    ("ulysses", "1f1b", "selective_op"),
                    ("ulysses", "gpipe", "offload"),
                    ("gather", "interleaved", "selective_op"),
                    ("ring", "interleaved", "full"),
                    ("ulysses", "interleaved", "nested"),
                ]
            ),
            *(
                (
                    {"cp": 2, "cp_method": method, "reshard_after_forward": False},
                    f"on parts of sequences by {method}",
                    schedule,
                    variant,
                )
                for method, schedule, variant in [
                    ("gather", "zero_bubble", "full"),
                    ("gather", "zbv", "selective_op"),
                    ("ring", "zero_bubble", "nested"),
                    ("ring", "zbv", "full"),
                    ("ulysses", "zero_bubble", "selective_layer"),
                    ("ulysses", "zbv", "offload"),
                ]
            ),
        ]
    ),
]


@pytest.mark.parametrize(("mesh", "schedule", "variant"), MESHES)
def test_pipelines_next_to_other_parallelism(
    pool4: RankPool, mesh: dict[str, Any], schedule: str, variant: str
) -> None:
    case = _case(schedule, variant, mesh=mesh, dropout=0.1)
    for parity in pool4.run(cases.parity, case):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level) == ("bitwise", "tolerance")


_SPLITS: dict[str, dict[str, Any]] = {
    "sequence": {"tp": 2, "sp": True},
    "logits": {"tp": 2, "loss_parallel": True},
    "both": {"tp": 2, "sp": True, "loss_parallel": True},
}
_USUAL = ("both", "llama", "1f1b", "full")
IN_PARTS = [
    pytest.param(
        split, model, schedule, variant,
        id=f"{split}, {model}, {variant} on {schedule}",
        marks=[] if (split, model, schedule, variant) == _USUAL else [pytest.mark.matrix],
    )
    for model, splits in [("llama", ("sequence", "logits", "both")), ("hf_llama", ("both",))]
    for split in splits
    for schedule in SCHEDULES
    for variant in (*VARIANTS, "budget")
]  # fmt: skip


@pytest.mark.parametrize(("split", "model", "schedule", "variant"), IN_PARTS)
def test_stages_pass_on_parts_of_the_sequence_and_the_last_one_has_parts_of_logits(
    pool4: RankPool, split: str, model: str, schedule: str, variant: str
) -> None:
    case = _case(schedule, variant, model=model, mesh=_SPLITS[split], dropout=0.1)
    for parity in pool4.run(cases.parity, case):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level) == ("bitwise", "tolerance")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", ["none", "full", "selective_op"])
def test_bytes_and_collectives_of_stages_in_parts_are_predicted(
    pool4: RankPool, schedule: str, variant: str
) -> None:
    case = _case(schedule, variant, mesh=_SPLITS["both"], dropout=0.1)
    predicted = [step_of(case, rank=at) for at in predicted_ranks(case)]
    for rank, (memory, work) in enumerate(pool4.run(cases.measured, case)):
        foreseen = predicted[case.mesh.coordinate(rank).pp]
        for part in fields(StepBytes):
            assert getattr(memory, part.name) == getattr(foreseen.memory, part.name)
        assert work.collectives == foreseen.work.collectives
        assert work.collectives_repeated == foreseen.work.collectives_repeated
        assert work.collective_bytes == foreseen.work.collective_bytes


_OF_TRANSFORMERS = {
    "LlamaConfig": {"attention_dropout": 0.1},
    "Qwen3Config": {"attention_dropout": 0.1, "head_dim": 8},
    "OlmoeConfig": {"attention_dropout": 0.1, "num_experts": 4, "num_experts_per_tok": 2},
}
OTHERS = [
    pytest.param(
        HFSpec(
            name=name, layers_fqn="model.layers", vocab_size=64, config_class=name, n_layers=4, width=32,
            n_heads=4, overrides={"intermediate_size": 64, "tie_word_embeddings": False, **own},
        ),
        schedule,
        variant,
        id=f"{name} with {variant} on {schedule}",
        marks=pytest.mark.matrix,
    )
    for name, own in _OF_TRANSFORMERS.items()
    for schedule, variant in [("1f1b", "selective_op"), ("zbv", "full"), ("zero_bubble", "nested")]
    if (name, variant) != ("OlmoeConfig", "selective_op")
]  # fmt: skip
"""Models that were not written to be cut."""
_USERS = PythonSpec(
    name="user", layers_fqn="layers", vocab_size=256, factory="tests.harness.user_models:healthy",
    tp_column=(), tp_row=(), pp_split=("layers",),
)  # fmt: skip
OTHERS.append(pytest.param(_USERS, "gpipe", "full", id="a user's with full on gpipe"))


@pytest.mark.parametrize(("spec", "schedule", "variant"), OTHERS)
def test_models_that_were_not_written_to_be_cut(
    pool2: RankPool, spec: ModelSpec, schedule: str, variant: str
) -> None:
    case = _case(schedule, variant)
    case = replace(case, model=spec, ac=replace(case.ac, layers_fqn=spec.layers_fqn))  # type: ignore[call-arg]  # of blocks
    for parity in pool2.run(cases.parity, case):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level) == ("bitwise", "bitwise")


BY_STAGE = [
    ("1f1b", ("nested", "selective_op")),
    ("gpipe", ("none", "full")),
    ("zero_bubble", ("full", "none", "offload", "nested")),
    ("zbv", ("selective_op", "full", "none", "selective_op")),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("schedule", "stages"), BY_STAGE)
def test_each_stage_may_have_its_own_variant(pool2: RankPool, schedule: str, stages: tuple[str, ...]) -> None:
    own = next(name for name in stages if name != "none")
    for parity in pool2.run(cases.parity, _case(schedule, own, stage_ac=stages, dropout=0.1)):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level) == ("bitwise", "bitwise")
