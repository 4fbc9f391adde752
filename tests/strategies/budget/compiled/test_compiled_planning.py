"""`ac=budget ac.executor=compiled`: compiled blocks do what is planned, to the byte and the FLOP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.trial.batches import batches
from harness.trial.plan_budget import PLAN_FILE
from strategies import StrategyError
from tests.harness.composing import experiment_of
from tests.strategies.budget.compiled.compiled_pair import COMPILED, CPU, Pair, trained

# what torch's compilers do with their own things
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of", "ignore:`torch.jit")
_SMALL = "model.n_layers=2 batch_size=4 data=synthetic"


@pytest.fixture(autouse=True)
def no_trace_of_a_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


ROWS = {
    "gpt, recomputed for nothing": ("model=gpt_nano ac.fraction=0.95", False),
    "gpt": ("model=gpt_nano ac.fraction=0.8", True),
    "gpt, dropout": ("model=gpt_nano model.dropout=0.1 ac.fraction=0.75", True),
    "gpt, time": ("model=gpt_nano ac.fraction=0.8 ac.objective=time", True),
    "llama": ("model=llama_nano ac.fraction=0.65", True),
    "vit": ("model=vit_nano batch_size=16 ac.fraction=0.7", True),
}


@pytest.mark.parametrize(("line", "costs"), ROWS.values(), ids=ROWS)
def test_a_compiled_plan_is_neutral_and_exact(line: str, costs: bool, tmp_path: Path) -> None:
    pair = Pair(f"compile=aot_eager {_SMALL} {line}", tmp_path)
    plan = pair.plan
    assert all(map(torch.equal, pair.state, pair.twin_state))
    report, twin = pair.reports()
    assert report.memory.peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
    assert report.memory.peak_bytes < plan.plain_peak_bytes
    assert report.work.recomputed_flops - twin.work.recomputed_flops == plan.extra_flops
    assert plan.lower_bound_extra_flops <= plan.extra_flops
    assert (plan.extra_flops > 0) == costs
    assert (plan.executor, plan.versions["compiler"]) == ("compiled", "aot_eager")


@pytest.mark.slow
def test_generated_kernels_keep_the_budget(tmp_path: Path) -> None:
    pair = Pair(f"compile=inductor {_SMALL} model=llama_nano ac.fraction=0.75", tmp_path)
    assert pair.plan.spare_bytes
    assert pair.plan.predicted_peak_bytes <= pair.plan.budget_bytes - pair.plan.spare_bytes
    assert [file.name for file in tmp_path.iterdir()] == [PLAN_FILE]
    assert all(map(torch.equal, pair.state, pair.twin_state))
    report, twin = pair.reports()
    assert report.memory.peak_bytes <= pair.plan.budget_bytes
    assert report.memory.peak_bytes < twin.memory.peak_bytes
    assert report.work.recomputed_flops - twin.work.recomputed_flops == pair.plan.extra_flops


def test_blocks_that_are_planned_alike_are_compiled_once(tmp_path: Path) -> None:
    pair = Pair(f"compile=aot_eager {_SMALL} model=gpt_nano ac.fraction=0.95", tmp_path)
    planned = {replace(block, fqn="") for block in pair.plan.blocks}
    assert pair.planned.compiled is not None
    assert len(pair.planned.compiled) == 2 * len(planned)


def test_a_budget_that_needs_nothing_leaves_the_compiler_its_own_partition(tmp_path: Path) -> None:
    pair = Pair(f"compile=aot_eager {_SMALL} model=llama_nano ac.fraction=1", tmp_path)
    assert pair.plan.is_plain
    report, twin = pair.reports()
    assert report.memory.peak_bytes == twin.memory.peak_bytes <= pair.plan.plain_peak_bytes
    assert report.work.recomputed_ops == twin.work.recomputed_ops


def test_smaller_inputs_are_compiled_with_the_same_plan_and_larger_ones_refused(tmp_path: Path) -> None:
    line = f"compile=aot_eager {_SMALL} model=gpt_nano ac.fraction=0.8"
    pair = Pair(line, tmp_path)
    planned, twin = pair.gradients(pair.batch(0).rows(0, 1))
    assert all(map(torch.equal, planned, twin))
    larger = batches(experiment_of(f"{COMPILED} {line} batch_size=8"), CPU, 0)(0)
    with pytest.raises(StrategyError, match=r"^ac: the plan of 'layers\.0' was made for input \d+ of \(4, "):
        pair.planned.forward(larger)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.up(x).sin().cos())
        return made


class _OtherBlock(_Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.up(x).cos().sin())
        return made


class _Breaking(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        made: Tensor = self.down(x.sin())
        return made


class _Writing(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen: Tensor
        self.seen.add_(x.detach().mean(0))
        return super().forward(x)


class _Counting(_Block):
    def forward(self, x: Tensor) -> Tensor:
        positive = x[x[:, 0] > 0]
        return super().forward(x) + super().forward(positive).sum()


def _model(
    block: type[_Block], containers: Sequence[str] = ("blocks",)
) -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    model = nn.Sequential()
    for name in containers:
        model.add_module(name, nn.Sequential(*(block() for _ in range(3))))
    return model, (torch.randn(32, 16),), torch.sum


def of_blocks() -> Any:
    return _model(_Block)


def of_two_containers() -> Any:
    return _model(_Block, ("stem", "blocks"))


def of_other_blocks() -> Any:
    return _model(_OtherBlock)


def breaking() -> Any:
    return _model(_Breaking)


def writing() -> Any:
    return _model(_Writing)


def counting() -> Any:
    return _model(_Counting)


def user(factory: str, more: str) -> str:
    where = "tests.strategies.budget.compiled.test_compiled_planning"
    return f"model=python model.layers_fqn=blocks model.factory={where}:{factory} compile=aot_eager {more}"


def test_blocks_that_are_named_by_class_are_compiled_by_themselves(tmp_path: Path) -> None:
    pair = Pair(user("of_two_containers", "ac.module_classes=[_Block] ac.fraction=0.75"), tmp_path)
    assert [block.fqn for block in pair.plan.blocks] == [
        f"{container}.{number}" for container in ("stem", "blocks") for number in range(3)
    ]
    assert all(map(torch.equal, pair.state, pair.twin_state))
    planned, twin = pair.reports()
    assert planned.memory.peak_bytes == pair.plan.predicted_peak_bytes < twin.memory.peak_bytes


UNSUITABLE = {
    "a graph break": ("breaking", r"^ac\.executor: 'blocks\.0' is not one graph: "),
    "a write": ("writing", r"^ac\.executor: .* in 'blocks\.0' writes in place, and may not run again; use "),
    "sizes that depend on data": (
        "counting",
        r"^ac\.executor: 'blocks\.0' has sizes that are not known before it runs, such as ",
    ),
}


@pytest.mark.parametrize(("factory", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_blocks_that_have_no_plan_are_refused(factory: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message) as error:
        Pair(user(factory, "ac.fraction=0.9"), tmp_path)
    assert str(error.value).endswith("use ac.executor=eager compile=none")


OTHERS = {
    "another graph": (
        "of_other_blocks",
        {},
        r"^ac: the plan of 'blocks\.\d' was made for a graph of digest ",
    ),
    "another compiler": (
        "of_blocks",
        {"versions": {"torch": torch.__version__, "compiler": "inductor"}},
        r"^ac\.plan_file: was made for compile=inductor, whose graphs are others than those of aot_eager; ",
    ),
}


@pytest.mark.parametrize(("factory", "changes", "message"), OTHERS.values(), ids=OTHERS)
def test_a_plan_of_something_else_is_refused(
    factory: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pair = Pair(user("of_blocks", "ac.fraction=0.9"), tmp_path)
    replace(pair.plan, **changes).save(tmp_path / "other.json")
    experiment = experiment_of(f"{COMPILED} {user(factory, '')} ac.plan_file={tmp_path}/other.json")
    with pytest.raises(StrategyError, match=message):
        trained(experiment, batches(experiment, CPU, 0))
