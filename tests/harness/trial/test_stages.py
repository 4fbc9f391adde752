from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.errors import ConfigError
from harness.experiment.mesh import Mesh
from harness.models.base import Batch, ModelSpec
from harness.trial.batches import batches
from harness.trial.plain_model import PlainModel
from harness.trial.stages import Stage, Stages, between_stages, cut
from tests.parity import cases

_CPU = torch.device("cpu")
_GPT = replace(cases.MODELS["gpt"], tied_head=False, n_layers=4)  # type: ignore[call-arg]  # of transformers


def _of(name: str, **sizes: Any) -> tuple[PlainModel, ModelSpec, Batch]:
    case = cases.experiment(model=name, variant="none", batch_size=2, sequence_length=8)
    spec = _GPT if name == "gpt" else replace(case.model, n_layers=4)  # type: ignore[call-arg]  # of transformers
    case = replace(case, model=replace(spec, **sizes))
    return PlainModel.of(case, _CPU), case.model, batches(case, _CPU, 0)(0)


def _stages(plain: PlainModel, spec: ModelSpec, mesh: Mesh) -> dict[int, Stage]:
    made = [stage for rank in range(mesh.pp) for stage in cut(plain, spec.stage_parts(), mesh, rank)]
    return {stage.index: stage for stage in sorted(made, key=lambda stage: stage.index)}


@pytest.mark.parametrize("name", ["llama", "gpt", "moe", "vit"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_stages_one_after_the_other_are_the_model(name: str, schedule: str) -> None:
    plain, spec, batch = _of(name)
    whole = plain.model(*batch.inputs)
    between = between_stages(plain, spec.stage_parts(), batch)
    given = batch.inputs[0]
    for stage in _stages(plain, spec, Mesh(pp=2, pp_schedule=schedule)).values():
        if stage.index:
            assert (given.shape, given.dtype) == (between.shape, between.dtype)
        given = stage.model(given)
    assert torch.equal(given, whole)


def test_parameters_have_their_names_and_one_stage_each() -> None:
    plain, spec, _ = _of("gpt")
    names = [name for name, _ in plain.model.named_parameters()]
    mesh = Mesh(pp=2, pp_schedule="interleaved")
    found = [
        [name for name, _ in stage.model.named_parameters()] for stage in _stages(plain, spec, mesh).values()
    ]
    assert [name for each in found for name in each] == names
    assert [sorted({name.split(".")[0] for name in each}) for each in found] == [
        ["embedding", "layers", "position"], ["layers"], ["layers"], ["head", "layers", "norm"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "pp", "shares"),
    [
        (4, 2, ["0 1", "2 3"]),
        (5, 2, ["0 1 2", "3 4"]),
        (7, 4, ["0 1", "2 3", "4 5", "6"]),
        (4, 4, ["0", "1", "2", "3"]),
    ],
)  # fmt: skip
def test_blocks_are_shared_evenly_and_the_first_stages_have_the_rest(
    blocks: int, pp: int, shares: list[str]
) -> None:
    plain, spec, _ = _of("llama", n_layers=blocks)
    found = _stages(plain, spec, Mesh(pp=pp)).values()
    assert [" ".join(name.removeprefix("layers.") for name in stage.units) for stage in found] == shares


def test_several_stages_of_a_rank_name_modules_as_the_whole_model_does() -> None:
    plain, spec, _ = _of("llama")
    names = {
        id(module): name for name, module in plain.model.named_modules() if name and module is not plain.model
    }
    of_rank = cut(plain, spec.stage_parts(), Mesh(pp=2, pp_schedule="zbv"), 0)
    both = Stages([stage.model for stage in of_rank])
    known = [(name, module) for name, module in both.named_modules() if id(module) in names]
    assert [name for name, _ in known] == [names[id(module)] for _, module in known]
    assert {name for name, _ in known} >= {"embedding", "layers.0", "layers.3", "norm", "head"}
    assert [name for name, _ in both.named_buffers()] == ["rotary"]


def test_fewer_blocks_than_stages_are_refused() -> None:
    plain, spec, _ = _of("llama", n_layers=2)
    with pytest.raises(ConfigError) as refusal:
        cut(plain, spec.stage_parts(), Mesh(pp=4), 0)
    assert str(refusal.value) == (
        "mesh.pp: makes 4 stages of 2 blocks, which leaves a stage without any; use fewer ranks or stages, "
        "or a model with more blocks"
    )


def test_what_goes_between_stages_draws_no_random_number() -> None:
    plain, spec, batch = _of("gpt", dropout=0.5)
    before = torch.get_rng_state()
    between = between_stages(plain, spec.stage_parts(), batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert (between.shape, between.dtype) == ((2, 8, 32), torch.float32)
