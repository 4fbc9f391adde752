"""One plan of blocks and chunks: it keeps its budget to the byte, and the step stays the plain one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.experiment.experiment import Experiment, name_of
from harness.experiment.mesh import Mesh
from harness.measure.step import instrument
from harness.models.python import PythonSpec
from harness.predict.fake_rank import planned_on_fake_rank
from harness.predict.prediction import predict
from harness.predict.views import view_of
from harness.trial import plan_budget
from harness.trial.batches import batches
from harness.trial.links import Link
from harness.trial.plan_budget import PLAN_FILE, with_plan
from harness.trial.plan_files import file_of
from harness.trial.steps import warm_up
from strategies import RunnableStep, StrategyError, chunk_variants
from strategies.ac.budget import Budget
from strategies.base import Observation
from tests.covering import marked
from tests.harness.composing import experiment_of
from tests.parity import cases
from tests.rank_pool import RankPool

_CPU = torch.device("cpu")
_SMALL = {"n_layers": 1, "width": 16, "hidden_width": 32, "vocab_size": 512}
_VOCABULARY, _WIDTH = 256, 16


class Shifted(nn.Module):
    """Blocks and a tied head; forward returns the loss of the tokens that follow, where they count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Dropout(0.1)) for _ in range(2)
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = x + block(x)
        logits = functional.linear(x, self.embedding.weight)[:, :-1]
        return functional.cross_entropy(
            logits.reshape(-1, _VOCABULARY), labels[:, 1:].reshape(-1), ignore_index=-100
        )


def shifted() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    torch.manual_seed(0)
    tokens = torch.randint(_VOCABULARY, (4, 16))
    return Shifted(), (tokens, tokens.masked_fill(tokens % 3 == 0, -100)), lambda loss: loss


def case_of(model: str = "mlp", *, fraction: float = 0.6, **fields: Any) -> Experiment:
    options = {"fraction": fraction, **fields.pop("options", {})}
    sizes = {**_SMALL, **fields.pop("sizes", {})}
    usual = {"batch_size": 4, "optimizer": "sgd", "parity_steps": 2}
    name = "mlp" if model == "shifted" else model
    case = cases.experiment(
        model=name, variant="budget", options=options, chunk="budget", **{**usual, **fields}
    )
    if model != "shifted":
        return replace(case, model=replace(case.model, **sizes))
    factory = f"{__name__}:shifted"
    spec = PythonSpec(
        name="shifted",
        layers_fqn="layers",
        vocab_size=1,
        dropout=None,
        factory=factory,
        tp_column=(),
        tp_row=(),
    )
    return replace(case, model=spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a planned step showed: the plan, the peak, the chunks, and differences to the plain model."""

    experiment: Experiment
    plan: Mapping[str, Any]
    peak_bytes: int
    observation: Observation
    differs: list[str]

    @property
    def is_exact(self) -> bool:
        predicted, budget = int(self.plan["predicted_peak_bytes"]), int(self.plan["budget_bytes"])
        return self.peak_bytes == predicted <= budget


def found(rank: int, planned: Experiment, file: Path) -> Found:
    """Run one planned step and compare two."""
    batch = batches(planned, _CPU, planned.mesh.data_rank(rank))
    make = partial(cases.assembled, sample=batch(0))
    trainee = make(planned)
    warm_up(trainee, batch)
    report = instrument(trainee, batch(2))
    prover = cases._Prover(assembled=make, dense=make, once=cases._once, batch=batch, rank=rank, dp_rank=rank)
    link = Link(variant=planned, baseline=planned.plain(), steps=2, tolerance=planned.tolerance, whole=False)
    return Found(
        experiment=planned,
        plan=json.loads(file.read_text()),
        peak_bytes=report.memory.peak_bytes,
        observation=trainee.observe(),
        differs=cases.differences(prover.compare(link)),
    )


def planned_and_run(rank: int, case: Experiment) -> Found:
    with cases._shared_folder() as folder:
        batch = batches(case, _CPU, case.mesh.data_rank(rank))
        make = partial(cases.assembled, sample=batch(0))
        planned = with_plan(case, make, batch, folder / PLAN_FILE, device=_CPU)
        return found(rank, planned, folder / PLAN_FILE)


@cache
def steps_of() -> tuple[Experiment, list[RunnableStep]]:
    """Return a case and its steps, whole and in chunks: one search for all budgets."""
    case = case_of()
    batch = batches(case, _CPU, 0)
    make = partial(cases.assembled, sample=batch(0))
    asked = plan_budget._Asked(experiment=case, assemble=make, batch=batch, warmed=warm_up)
    with (
        TemporaryDirectory() as folder,
        plan_budget._offered(case, batch(0), _CPU, Path(folder, "chunks")) as offers,
    ):
        return case, list(asked.steps(offers))


def planned_for(fraction: float, file: Path) -> Experiment:
    """Return the case with the plan for a budget."""
    case, steps = steps_of()
    assert isinstance(case.ac, Budget)
    replace(case.ac, fraction=fraction).write_best_plan(steps, file)
    return carried_out(replace(case, ac=case.ac.with_plan(file)), file)


def carried_out(case: Experiment, file: Path) -> Experiment:
    """Return a case with a plan, and the chunks of that plan."""
    batch = batches(case, _CPU, 0)
    return with_plan(case, partial(cases.assembled, sample=batch(0)), batch, file, device=_CPU)


def test_a_budget_that_needs_nothing_has_no_chunks(tmp_path: Path) -> None:
    seen = found(0, planned_for(1.0, tmp_path / PLAN_FILE), tmp_path / PLAN_FILE)
    assert name_of(seen.experiment.chunk) == "none"
    assert (seen.plan["chunk"], seen.plan["chunkings"]) == (None, 3)
    assert seen.peak_bytes == seen.plan["plain_peak_bytes"]
    assert seen.observation.unneeded == "the budget needs nothing: the step fits it as it is"
    assert seen.differs == []


@pytest.mark.parametrize(
    ("fraction", "costs"),
    [
        pytest.param(0.5, False, id="0.5"),
        pytest.param(0.35, False, id="0.35"),  # the gradients of the head are made in forward
        pytest.param(0.305, True, id="0.305"),
    ],
)
def test_a_budget_that_only_chunks_keep(tmp_path: Path, fraction: float, costs: bool) -> None:
    seen = found(0, planned_for(fraction, tmp_path / PLAN_FILE), tmp_path / PLAN_FILE)
    assert seen.is_exact
    assert seen.differs == []
    assert seen.observation.unneeded is None
    assert seen.observation.plan is not None
    chunk = seen.observation.plan["chunk"]
    assert chunk["why"].startswith("without chunks the smallest peak is ")
    assert seen.observation.chunks == sum(region["chunks"] for region in chunk["regions"]) > 0
    bound, extra = seen.plan["lower_bound_autograd_flops"], seen.plan["extra_flops"]
    assert 0 <= seen.plan["lower_bound_extra_flops"] <= bound <= extra
    assert (bound > 0, extra > 0) == (costs, costs)


def test_a_budget_below_the_smallest_peak_of_all_chunks(tmp_path: Path) -> None:
    with pytest.raises(StrategyError) as caught:
        planned_for(0.1, tmp_path / PLAN_FILE)
    planned_for(1.0, tmp_path / PLAN_FILE)
    plan = json.loads((tmp_path / PLAN_FILE).read_text())
    smallest, plain = plan["minimum_feasible_bytes"], plan["plain_peak_bytes"]
    share = math.ceil(1e4 * smallest / plain) / 1e4
    gib = math.ceil(1e9 * smallest / 2**30) / 1e9
    assert str(caught.value) == (
        f"ac.fraction: no plan keeps {int(0.1 * plain)} bytes; the smallest that one keeps is {smallest} "
        f"bytes, ac.fraction={share:g} or ac.budget_gib={gib:.9g}; no schedule of these operators, whole or "
        f"in one of 3 ways to chunk them, needs less than {plan['proven_minimum_bytes']} bytes"
    )
    assert planned_for(share, tmp_path / PLAN_FILE)


def test_a_plan_with_chunks_is_refused_without_them(tmp_path: Path) -> None:
    file = tmp_path / PLAN_FILE
    planned = planned_for(0.5, file)
    whole = replace(planned, chunk=chunk_variants["none"]())
    with pytest.raises(StrategyError) as caught:
        carried_out(whole, file)
    assert str(caught.value) == (
        f"ac.plan_file: '{file}' counts on chunks; use chunk=budget, or a plan of chunk=none"
    )


def test_views_of_a_plan_with_chunks(tmp_path: Path) -> None:
    asked = replace(planned_for(0.5, tmp_path / PLAN_FILE), chunk=chunk_variants["budget"]())
    plan = view_of(asked, "plan").splitlines()
    assert "whole or in one of 3 ways to chunk them, keeps the budget with less than" in plan[0]
    assert plan[1].startswith("chunks: without chunks the smallest peak is ")
    assert " chunks of " in plan[2]
    assert view_of(asked, "chunks").splitlines()[0] == (
        "# chosen by ac=budget; bytes and time are of a step that recomputes every block"
    )
    with pytest.raises(StrategyError) as caught:
        view_of(asked, "file")
    assert str(caught.value) == (
        "chunk: the plan numbers operators of programs in chunks, which file has no words for; "
        "use show=plan, or chunk=none"
    )


_SHIFTED = "labels that are shifted and ignored, a tied head, dropout"
CASES: dict[str, dict[str, Any]] = {
    _SHIFTED: {"model": "shifted", "fraction": 0.5},
    "a tied head beside attention": {"model": "gpt", "sizes": {"n_heads": 2}, "fraction": 0.5},
    "one sample": {"batch_size": 1, "fraction": 0.85},
    "half precision": {"dtype": "bf16_mixed", "fraction": 0.6},
    "seconds": {"options": {"objective": "time"}, "fraction": 0.5},
    "host memory": {"options": {"host_gib": 1.0}, "fraction": 0.4, "sizes": {"n_layers": 2}},
    "loops in blocks, dropout": {
        "model": "gpt", "sizes": {"vocab_size": 32, "n_heads": 2, "n_layers": 2}, "dropout": 0.1,
        "batch_size": 8, "fraction": 0.37,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", marked([(name,) for name in CASES], [(_SHIFTED,)]))
def test_steps_with_chunks_keep_their_budget_to_the_byte(name: str) -> None:
    seen = planned_and_run(0, case_of(**CASES[name]))
    assert seen.is_exact
    assert seen.differs == []
    assert seen.plan["chunk"]["regions"]
    assert seen.peak_bytes < seen.plan["plain_peak_bytes"]


@pytest.mark.parametrize("mesh", marked([("ddp2",), ("shard2",)], [("shard2",)]))
def test_ranks_share_a_plan_with_chunks(pool2: RankPool, mesh: str) -> None:
    case = case_of(mesh=cases.MESHES[mesh], batch_size=8, fraction=0.65)
    for seen in pool2.run(planned_and_run, case, timeout_s=300.0):
        assert seen.peak_bytes <= seen.plan["budget_bytes"]
        assert seen.differs == []
        assert seen.plan["chunk"]["regions"]


def test_a_budget_below_what_the_optimizer_needs_says_so(tmp_path: Path) -> None:
    line = "model=mlp model.n_layers=1 data=synthetic batch_size=1 sequence_length=2 optimizer=adamw"
    asked = experiment_of(f"{line} ac=budget ac.fraction=0.1")
    remedy = "which no plan changes; shard the parameters, or take another optimizer"
    with pytest.raises(StrategyError, match=rf"; its peak lies in the optimizer's update, {remedy}$"):
        planned_on_fake_rank(asked, tmp_path / PLAN_FILE)


def staged(
    schedule: str, fraction: float, *, n_layers: int = 4, dropout: float = 0.1, **mesh: Any
) -> Experiment:
    """Return a case of a pipeline of 2 ranks."""
    case = cases.experiment(
        model="llama", mesh=Mesh(pp=2, pp_schedule=schedule, **mesh), variant="budget", batch_size=8,
        microbatches=4, dropout=dropout, options={"fraction": fraction}, parity_steps=2,
    )  # fmt: skip
    return replace(case, model=replace(case.model, n_layers=n_layers))  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a rank with a plan of its own has measured, and the plan."""

    plan: Mapping[str, Any]
    plain_bytes: int
    peak_bytes: int
    recomputed_flops: int


def kept(rank: int, case: Experiment, folder: Path) -> _Kept:
    """Return what the step of `case` takes on a rank, and of its twin."""
    batch = batches(case, _CPU, case.mesh.data_rank(rank))
    make = partial(cases.assembled, sample=batch(0).parts()[0])
    planned = with_plan(case, make, batch, folder / PLAN_FILE, device=_CPU, rank=rank)
    found = []
    for each in (planned, case.twin()):
        trainee = make(each)
        warm_up(trainee, batch)
        found.append(instrument(trainee, batch(2)))
    variant, twin = found
    file = file_of(folder / PLAN_FILE, case.mesh, rank)
    return _Kept(
        json.loads(file.read_text()),
        twin.memory.peak_bytes,
        variant.memory.peak_bytes,
        variant.work.recomputed_flops - twin.work.recomputed_flops,
    )


def _planned(case: Experiment, folder: Path) -> Experiment:
    """Return `case` with the plans that `kept` has left, so that it is not planned a second time."""
    assert case.ac.step_planner is not None
    return replace(case, ac=case.ac.step_planner.with_plan(folder / PLAN_FILE))


STAGED: list[Any] = [
    # schedule | blocks | share of the highest rank's peak | mesh; predicted and measured peaks are equal
    ("1f1b", 2, 0.85, {}),
    pytest.param("zero_bubble", 4, 0.85, {}, marks=pytest.mark.matrix),
    pytest.param("1f1b", 4, 0.8, {}, marks=pytest.mark.matrix),
    pytest.param("gpipe", 4, 0.6, {}, marks=pytest.mark.matrix),
    pytest.param("interleaved", 4, 0.8, {}, marks=pytest.mark.matrix),
    pytest.param("zbv", 4, 0.85, {}, marks=pytest.mark.matrix),
    pytest.param("zero_bubble", 4, 0.8, {"pp_split_backward": False}, marks=pytest.mark.matrix),
]


def _require_kept(found: list[_Kept], fraction: float) -> None:
    """See that plans of all ranks keep one budget, and are measured as they predict."""
    budget = int(fraction * max(each.plain_bytes for each in found))
    for each in found:
        assert each.plan["budget_bytes"] == budget
        assert each.plan["plain_peak_bytes"] == each.plain_bytes
        assert each.plan["predicted_peak_bytes"] == each.peak_bytes <= budget
        assert each.plan["extra_flops"] == each.recomputed_flops
    assert any(block["recompute"] for each in found for block in each.plan["blocks"])


@pytest.mark.parametrize(("schedule", "blocks", "fraction", "mesh"), STAGED)
def test_a_rank_of_a_pipeline_keeps_the_budget(
    schedule: str, blocks: int, fraction: float, mesh: dict[str, Any], tmp_path: Path, pool2: RankPool
) -> None:
    case = staged(schedule, fraction, n_layers=blocks, **mesh)
    found = pool2.run(kept, case, tmp_path)
    _require_kept(found, fraction)
    stages = [tuple(each.plan["stages"]) for each in found]
    assert stages == [case.mesh.stages_of(rank) for rank in range(2)]
    assert pool2.run(cases.prove, _planned(case, tmp_path)) == [[], []]


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_sharded_stages_keep_the_budget(schedule: str, tmp_path: Path, pool4: RankPool) -> None:
    case = staged(schedule, 0.85, dp_shard=2, reshard_after_forward=schedule in {"gpipe", "1f1b"})
    _require_kept(pool4.run(kept, case, tmp_path), 0.85)
    assert pool4.run(cases.prove, _planned(case, tmp_path)) == [[]] * 4


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_plans_of_all_stages_are_predicted(schedule: str, tmp_path: Path, pool2: RankPool) -> None:
    case = staged(schedule, 0.8)
    _require_predicted(case, pool2.run(kept, case, tmp_path), "pipeline")


def _require_predicted(case: Experiment, found: list[_Kept], of_all: str) -> None:
    """See that a prediction has the plans of all ranks, and the bytes that they have measured."""
    record = predict(case)
    assert record.memory is not None
    assert record.plan is not None
    assert [each.peak_bytes for each in record.memory.by_rank] == [each.peak_bytes for each in found]
    written = json.loads(json.dumps(record.plan[of_all]))
    assert [each["blocks"] for each in written] == [each.plan["blocks"] for each in found]
    assert record.plan["predicted_peak_bytes"] == max(each.peak_bytes for each in found)


_RING = {"cp": 2, "cp_method": "ring"}
_EXPERTS = {"dp_shard": 2, "ep": 2}
_MATRIX = pytest.mark.matrix
UNLIKE: list[Any] = [
    # model | blocks | share of the highest rank's peak | mesh of two ranks
    ("llama", 2, 0.9, _RING),
    pytest.param("llama", 4, 0.75, _RING, marks=_MATRIX),
    pytest.param("gpt", 4, 0.8, _RING, marks=_MATRIX),
    pytest.param("moe", 2, 0.8, {**_EXPERTS, "ep_capacity": 1.25}, marks=_MATRIX),
    pytest.param("moe", 4, 0.7, {**_EXPERTS, "ep_capacity": 0.75}, marks=[_MATRIX, pytest.mark.slow]),
]


def unlike(model: str, blocks: int, fraction: float, mesh: Mapping[str, Any]) -> Experiment:
    """Return a case whose ranks take unlike steps: with keys of more parts, or with other experts."""
    case = cases.experiment(
        model=model, mesh=Mesh(**mesh), variant="budget", batch_size=8, dropout=0.1, parity_steps=2,
        options={"fraction": fraction},
    )  # fmt: skip
    return replace(case, model=replace(case.model, n_layers=blocks))  # type: ignore[call-arg]


@pytest.mark.parametrize(("model", "blocks", "fraction", "mesh"), UNLIKE)
def test_ranks_with_unlike_steps_keep_one_budget(
    model: str, blocks: int, fraction: float, mesh: Mapping[str, Any], tmp_path: Path, pool2: RankPool
) -> None:
    case = unlike(model, blocks, fraction, mesh)
    found = pool2.run(kept, case, tmp_path)
    _require_kept(found, fraction)
    assert found[0].plan["blocks"] != found[1].plan["blocks"]
    cases.require_neutral(pool2.run(cases.parity, _planned(case, tmp_path)))


@_MATRIX
def test_plans_of_all_parts_of_a_ring_are_predicted(tmp_path: Path, pool2: RankPool) -> None:
    case = unlike("llama", 2, 0.8, _RING)
    _require_predicted(case, pool2.run(kept, case, tmp_path), "ranks")


@_MATRIX
def test_plans_of_experts_with_a_capacity_are_predicted(tmp_path: Path, pool2: RankPool) -> None:
    case = unlike("moe", 2, 0.8, {**_EXPERTS, "ep_capacity": 1.0})
    found, record = pool2.run(kept, case, tmp_path), predict(case)  # of rank 0, whose bytes are those of both
    assert record.memory is not None
    assert {each.peak_bytes for each in found} == {record.memory.peak_bytes}


@_MATRIX
@pytest.mark.parametrize(
    ("model", "fraction", "mesh"),
    [
        ("llama", 0.85, {**_RING, "dp_shard": 2}),
        ("llama", 0.9, {**_RING, "dp_replicate": 2}),
        ("llama", 0.85, {**_RING, "tp": 2, "sp": True}),
        ("moe", 0.85, {"dp_shard": 4, "ep": 2, "ep_capacity": 1.0}),
        ("moe", 0.85, {"dp_shard": 2, "ep": 2, "ep_capacity": 1.25, "tp": 2}),
    ],
)
def test_ranks_with_like_steps_share_a_plan(
    model: str, fraction: float, mesh: Mapping[str, Any], tmp_path: Path, pool4: RankPool
) -> None:
    case = unlike(model, 2, fraction, mesh)
    found = pool4.run(kept, case, tmp_path)
    _require_kept(found, fraction)
    cases.require_neutral(pool4.run(cases.parity, _planned(case, tmp_path)))


def _smallest(message: str) -> re.Match[str]:
    """Return what a refusal says of the smallest budget that all stages keep."""
    found = re.search(r"the smallest that one keeps is \d+ bytes, ac.fraction=([\d.]+) or", message)
    assert found is not None
    return found


def test_a_budget_that_a_stage_cannot_keep_is_refused(tmp_path: Path, pool2: RankPool) -> None:
    with pytest.raises(StrategyError) as refused:
        pool2.run(kept, staged("1f1b", 0.1, n_layers=2), tmp_path)
    assert "no plan of stage 0 keeps" in str(refused.value)
    assert float(_smallest(str(refused.value))[1]) > 0.1


@pytest.mark.slow
@pytest.mark.matrix
def test_the_budget_that_a_refusal_names_is_kept_by_all_stages(tmp_path: Path, pool2: RankPool) -> None:
    case = staged("gpipe", 0.1, n_layers=2)  # whose last stage needs more than the first, which refuses
    with pytest.raises(StrategyError, match="no plan of stage 0 keeps") as refused:
        pool2.run(kept, case, tmp_path)
    found = _smallest(str(refused.value))
    with pytest.raises(StrategyError, match=re.escape(found[0])):
        predict(case)
    fraction = float(found[1])
    _require_kept(pool2.run(kept, staged("gpipe", fraction, n_layers=2), tmp_path), fraction)
