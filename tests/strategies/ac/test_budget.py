"""`ac=budget`: values that it refuses, plan files, and what it says of a budget that needs nothing."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from strategies import StrategyError
from strategies.ac.budget import Budget
from strategies.budget.eager import first_call
from strategies.regions.blocks import Chunked
from strategies.regions.disguise import disguise
from tests.harness.composing import refusal_of
from tests.strategies.budget.small_steps import measured_peak_bytes, step_of
from tests.strategies.toys import differences, toy, train_step

MADE = "decides how a plan is made, and the one in ac.plan_file is made; leave one of the two out"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "neither": (
        {},
        "ac: give exactly one of ac.budget_gib, ac.fraction, ac.plan_file, got none of them",
    ),
    "both": (
        {"budget_gib": 1.0, "fraction": 0.5},
        "ac: give exactly one of ac.budget_gib, ac.fraction, ac.plan_file, got ac.budget_gib and ac.fraction",
    ),
    "no bytes": ({"budget_gib": 0}, "ac.budget_gib: must be above 0, got 0"),
    "no number": ({"budget_gib": float("nan")}, "ac.budget_gib: must be above 0, got nan"),
    "endless": ({"budget_gib": float("inf")}, "ac.budget_gib: must be above 0, got inf"),
    "more than all": ({"fraction": 1.1}, "ac.fraction: must be above 0 and at most 1, got 1.1"),
    "less than no host": (
        {"fraction": 0.5, "host_gib": -1},
        "ac.host_gib: must be at least 0 and finite, got -1",
    ),
    "endless host": (
        {"fraction": 0.5, "host_gib": float("inf")},
        "ac.host_gib: must be at least 0 and finite, got inf",
    ),
    "a host budget for a plan that is made": (
        {"plan_file": "plan.json", "host_gib": 1.0},
        f"ac.host_gib: {MADE}",
    ),
    "an objective for a plan that is made": (
        {"plan_file": "plan.json", "objective": "time"},
        f"ac.objective: {MADE}",
    ),
    "another objective": (
        {"fraction": 0.5, "objective": "bytes"},
        "ac.objective: must be both or flops or time, got 'bytes'",
    ),
    "another executor": (
        {"fraction": 0.5, "executor": "lazy"},
        "ac.executor: must be eager or compiled, got 'lazy'",
    ),
    "a compiled host": (
        {"fraction": 0.5, "executor": "compiled", "host_gib": 1},
        (
            "ac.host_gib: must be 0 for ac.executor=compiled, whose graphs move nothing to the host, got 1; "
            "use ac.executor=eager"
        ),
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_says_what_would_be_right(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        Budget(**fields)
    assert str(error.value) == message


def planned_toy(**fields: Any) -> tuple[Budget, Any]:
    budget = Budget(layers_fqn="layers", **fields)
    model = budget.apply(toy())
    train_step(model)
    return budget, model


def test_a_budget_below_the_smallest_is_refused_with_it() -> None:
    with pytest.raises(StrategyError) as error:
        planned_toy(fraction=0.1)
    smallest = str(error.value).partition("ac.fraction=")[2].partition(" ")[0]
    assert str(error.value).startswith("ac.fraction: no plan keeps ")
    _, model = planned_toy(fraction=float(smallest))
    assert differences(train_step(toy()), train_step(model)) == []


@pytest.mark.parametrize(
    ("fields", "asked_bytes", "reason"),
    [
        pytest.param({"fraction": 1.0}, None, "the step fits it as it is", id="all"),
        pytest.param(
            {"budget_gib": 10.0},
            10 << 30,
            "10737418240 bytes are above the peak without activation checkpointing, {} bytes",
            id="more than all",
        ),
        pytest.param(
            {"budget_gib": 1e308, "host_gib": 1e308},
            sys.maxsize,
            f"{sys.maxsize} bytes are above the peak without activation checkpointing, {{}} bytes",
            id="more bytes than there are",
        ),
    ],
)
def test_a_budget_that_needs_nothing_says_so(
    fields: dict[str, float], asked_bytes: int | None, reason: str
) -> None:
    budget, model = planned_toy(**fields)
    observed = budget.observe(model)
    assert observed.plan is not None
    plain_bytes = observed.plan["plain_peak_bytes"]
    assert observed.unneeded == f"the budget needs nothing: {reason.format(plain_bytes)}"
    assert observed.plan["budget_bytes"] == (asked_bytes or plain_bytes)
    assert observed.plan["extra_flops"] == 0
    assert type(model.layers[0]).__name__ == "Block"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    budget, model = planned_toy(fraction=0.92, objective="flops")
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps(budget.observe(model).plan))
    return file


def test_values_wait_on_the_host_where_it_has_room() -> None:
    budget, model = planned_toy(fraction=0.8, host_gib=0.001)
    assert differences(train_step(toy()), train_step(model)) == []
    observed = budget.observe(model)
    assert observed.plan is not None
    assert observed.plan["extra_flops"] == 0
    assert 0 < observed.offloaded_bytes == observed.plan["offloaded_bytes"] <= 0.001 * 2**30


def test_a_plan_file_is_carried_out(plan_file: Path) -> None:
    budget = Budget(layers_fqn="layers", plan_file=str(plan_file))
    model = budget.apply(toy())
    assert differences(train_step(toy()), train_step(model)) == []
    assert json.loads(json.dumps(budget.observe(model).plan)) == json.loads(plan_file.read_text())


def test_a_plan_takes_smaller_inputs_bit_for_bit_and_refuses_larger_ones(plan_file: Path) -> None:
    plain, model = toy(), Budget(layers_fqn="layers", plan_file=str(plan_file)).apply(toy())
    tokens = torch.arange(14).reshape(2, 7) % 4
    for each in (plain, model):
        torch.manual_seed(1)
        each(tokens).square().sum().backward()
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert actual.grad is not None
        assert torch.equal(expected.grad, actual.grad)
    with pytest.raises(StrategyError) as error:
        model(torch.zeros(8, 8, dtype=torch.long))
    made_for = "was made for input 0 of (2, 8, 16), not (8, 8, 16)"
    assert str(error.value) == f"ac: the plan of 'layers.0' {made_for}; make it again for these sizes"


def gradients(model: nn.Module, *batches: torch.Tensor) -> list[Any]:
    """Return what a step leaves whose batches are all in flight at once."""
    torch.manual_seed(1)
    model.zero_grad()
    losses = [model(batch).square().sum() for batch in batches]
    for loss in losses:
        loss.backward()
    return [*(each.grad for each in model.parameters() if each.grad is not None), torch.get_rng_state()]


def test_a_model_that_plans_itself_plans_anew_for_larger_inputs() -> None:
    budget = Budget(fraction=0.92, layers_fqn="layers")
    plain, model = toy(), budget.apply(toy())
    small, large = (torch.arange(rows * 8).reshape(rows, 8) % 4 for rows in (2, 3))
    budgets = []
    for batches in ((small,), (large,), (small[:, :7],), (large,)):
        assert all(map(torch.equal, gradients(plain, *batches), gradients(model, *batches)))
        plan = budget.observe(model).plan
        assert plan is not None
        budgets.append(plan["budget_bytes"])
    first, second, third, fourth = budgets
    assert first == third < second == fourth


@dataclass
class Predicted:
    logits: torch.Tensor


class Wrapping(nn.Module):
    """Returns what its model does in an object."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = toy(), wrap

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.wrap(self.net(tokens))


@pytest.mark.parametrize("wrap", [Predicted, lambda logits: SimpleNamespace(all=[logits])])
def test_a_first_call_plans_for_outputs_that_objects_hold(wrap: Callable[[torch.Tensor], Any]) -> None:
    budget, plans = Budget(fraction=0.92, layers_fqn="net.layers"), []
    for each in (lambda logits: logits, wrap):
        model = budget.apply(Wrapping(each))
        model(torch.arange(16).reshape(2, 8) % 4)
        plans.append(budget.observe(model).plan)
    assert plans[0] == plans[1]


def test_calls_in_flight_are_refused_where_the_budget_may_be_exceeded() -> None:
    budget = Budget(fraction=0.92, layers_fqn="layers")
    model = budget.apply(toy())
    batch = torch.arange(16).reshape(2, 8) % 4
    kept = [gradients(model, batch) for _ in range(3)]  # what has run backward waits no more
    del kept
    with torch.no_grad():
        evaluated = model(batch)
    model(batch)  # its graph is gone with its result
    waiting = model(batch)
    with pytest.raises(StrategyError) as error:
        model(batch)
    most = budget_bytes(budget, model)
    assert re.fullmatch(
        r"ac: 2 calls of the model would wait for backward and may need \d+ bytes; the plan of the first "
        rf"call keeps {most} bytes for one; run backward of a call before the next; or write a plan "
        r"of a step by Budget.write_plan and give it as ac.plan_file, as trials do, for the step with all "
        r"calls; or use ac=full",
        str(error.value),
    )
    (waiting + evaluated).sum().backward()
    model(batch).sum().backward()


def test_calls_in_flight_run_where_the_budget_has_room_for_them() -> None:
    plain, model = toy(), Budget(budget_gib=0.001, layers_fqn="layers").apply(toy())
    batches = [torch.arange(16).reshape(2, 8) % 4 for _ in range(3)]
    assert all(map(torch.equal, gradients(plain, *batches), gradients(model, *batches)))


class Aliased(nn.Module):
    """A model whose blocks have a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = toy()
        self.blocks = self.net.get_submodule("layers")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(tokens)
        return outputs


@pytest.mark.parametrize("layers_fqn", ["blocks", "net.layers"])
def test_blocks_may_have_two_names(layers_fqn: str) -> None:
    tokens = torch.arange(16).reshape(2, 8) % 4
    budget = Budget(fraction=0.92, layers_fqn=layers_fqn)
    plain, model = Aliased(), budget.apply(Aliased())
    assert all(map(torch.equal, gradients(plain, tokens), gradients(model, tokens)))
    plan = budget.observe(model).plan
    assert plan is not None
    assert not all(block["plain"] for block in plan["blocks"])


def ragged_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return sequences of 1 and of the other rows, as one jagged tensor."""
    return torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 1, len(rows)]))


class Ragged(nn.Module):
    """A model whose blocks get nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = ragged_rows(rows)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.values()


def test_nested_tensors_are_refused_by_name() -> None:
    model = Budget(fraction=1.0, layers_fqn="layers").apply(Ragged())
    problem = (
        "ac: input 0 of a call is a nested tensor, whose sizes are data, and plans are for sizes; use ac=full"
    )
    with pytest.raises(StrategyError, match=re.escape(problem)):
        model(torch.ones(5, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks for it
@pytest.mark.parametrize("is_planned", [False, True], ids=["at its first call", "planned"])
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a block"])
def test_compiled_blocks_are_refused_by_name(plan_file: Path, whole: bool, is_planned: bool) -> None:
    how: dict[str, Any] = {"plan_file": str(plan_file)}
    how = how if is_planned else {"fraction": 0.92, "objective": "flops"}
    model = Budget(layers_fqn="layers", **how).apply(toy())
    first = model.get_submodule("layers.0")
    if not whole:
        first.compile(backend="eager")
    call = torch.compile(model, backend="eager") if whole else model
    where = "the model" if whole else "'layers.0'"
    problem = f"ac: {where} is compiled, and its plan follows the operators of eager blocks; use ac=compiler"
    with pytest.raises(StrategyError, match=re.escape(problem)):
        call(torch.arange(16).reshape(2, 8) % 4)


class Reducing(nn.Linear):
    """A block whose output ranks add up."""

    mesh: DeviceMesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = functional_collectives.all_reduce(super().forward(x), "sum", (self.mesh, 0))
        return total


def test_a_first_call_refuses_collectives_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        monkeypatch.setattr(Reducing, "mesh", init_device_mesh("cpu", (2,)), raising=False)
        model = Budget(fraction=1.0, layers_fqn="0").apply(nn.Sequential(nn.Sequential(Reducing(4, 4))))
        with pytest.raises(StrategyError) as error:
            model(torch.ones(2, 4))
    finally:
        distributed.destroy_process_group()
    collective = (
        "the model runs the collective _c10d_functional.all_reduce.default; on each rank write a plan"
    )
    assert f"ac: the first call plans on tensors without memory, and {collective}" in str(error.value)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))
    return nn.Sequential(nn.Sequential(*layers))


def test_a_forward_set_on_a_planned_block_never_leaves_gradients_without_values() -> None:
    model = Budget(fraction=0.92, layers_fqn="0").apply(encoder())
    rows = torch.randn(4, 16, 8)
    model(rows).sum().backward()
    block = model.get_submodule("0.2")
    # holds the block, in its copy too
    block.forward = partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), block.forward)
    model.double()
    before = [each.grad for each in model.parameters()]
    with pytest.raises(StrategyError, match=r"a forward reaches '0\.2\.[\w.]+' itself"):
        model(rows.double())  # planned for anew
    after = [each.grad for each in model.parameters()]
    assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.7], ids=["little kept", "much kept"])
@pytest.mark.parametrize("shape", [(1, 16, 8), (8, 1, 8), (1, 1, 8)], ids=str)
def test_a_dimension_of_one_runs_other_operators_bit_for_bit_within_the_budget(
    shape: tuple[int, ...], share: float
) -> None:
    x = torch.randn(8, 16, 8)
    plan = Budget(fraction=1.0, layers_fqn="0").plan(first_call.shadow_step(encoder(), (x,), {}))
    smallest, largest = plan.minimum_feasible_bytes, plan.plain_peak_bytes
    budget = Budget(fraction=(smallest + share * (largest - smallest)) / largest, layers_fqn="0")
    plain, model = encoder(), budget.apply(encoder())
    gradients(model, x)
    rows = torch.randn(shape)
    expected = gradients(plain, rows)
    with pytest.warns(UserWarning, match="runs other operators on smaller inputs than on the planned ones"):
        assert all(map(torch.equal, expected, gradients(model, rows)))
    assert measured_peak_bytes(model, [rows], step_of(model, rows)) <= budget_bytes(budget, model)


def budget_bytes(budget: Budget, model: nn.Module) -> int:
    plan = budget.observe(model).plan
    assert plan is not None
    found: int = plan["budget_bytes"]
    return found


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
    block = nn.Sequential(*parts)
    return nn.Sequential(nn.Sequential(*(copy.deepcopy(block) for _ in range(3))), nn.Linear(16, 4))


def _evaluated(model: nn.Module, x: torch.Tensor) -> None:
    model.eval()(x).sum().backward()
    model.train().zero_grad()


def _frozen(model: nn.Module, x: torch.Tensor) -> None:
    for name in ("0", "1"):
        model.get_submodule(f"0.{name}").requires_grad_(False)
    model(x).sum().backward()
    model.requires_grad_(True).zero_grad()


def _wider(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for name in ("0.0", "0.1", "0.2"):
        model.set_submodule(f"{name}.0", nn.Linear(16, 96))
        model.set_submodule(f"{name}.3", nn.Linear(96, 16))
    model.zero_grad()


def _accumulated(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


BEFORE = {"evaluated": _evaluated, "frozen": _frozen, "wider blocks": _wider, "accumulated": _accumulated}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_what_a_first_call_planned_for_changes(before: Callable[[nn.Module, torch.Tensor], None]) -> None:
    budget, x = Budget(fraction=0.9, layers_fqn="0"), torch.randn(8, 16, 16)
    plain, model = perceptron(), budget.apply(perceptron())
    for each in (plain, model):
        torch.manual_seed(0)
        before(each, x)
        for _ in range(2):
            torch.manual_seed(1)
            each(x).sum().backward()
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (plain, model))))
    accumulates = before is _accumulated
    peaks = [
        measured_peak_bytes(each, [x], partial(_accumulated, each, x), accumulates=accumulates)
        for each in (plain, model)
    ]
    assert peaks[1] <= budget_bytes(budget, model) < peaks[0]


def test_what_accumulates_is_planned_for_the_largest_inputs() -> None:
    budget, x = Budget(fraction=0.7, layers_fqn="0"), torch.randn(64, 16, 16)
    plain, model = perceptron(), budget.apply(perceptron())
    planned = []
    for rows in (x, x[:32], x[:48], x):
        for each in (plain, model):
            torch.manual_seed(1)
            each(rows).sum().backward()
        planned.append(budget_bytes(budget, model))
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (plain, model))))
    assert planned[0] < planned[1] == planned[2] == planned[3]


def test_less_that_trains_keeps_the_budget_that_is_known() -> None:
    budget, x = Budget(fraction=0.6, layers_fqn="0"), torch.randn(64, 16, 16)
    model = budget.apply(perceptron())
    model(x).sum().backward()
    known = budget_bytes(budget, model)
    model.requires_grad_(False).get_submodule("1").requires_grad_(True)
    model(x).sum().backward()
    assert budget_bytes(budget, model) == known


def test_a_budget_without_room_for_gradients_that_stand() -> None:
    x = torch.randn(4, 16, 16)
    plan = Budget(fraction=1.0, layers_fqn="0").plan(first_call.shadow_step(perceptron(), (x,), {}))
    gib = plan.minimum_feasible_bytes / (1 << 30)
    model = Budget(budget_gib=gib, layers_fqn="0").apply(perceptron())
    model(x).sum().backward()
    stands = (
        r"ac\.budget_gib: no plan keeps .*; gradients of earlier calls stand in this one: call zero_grad\(\)"
    )
    with pytest.raises(StrategyError, match=stands):
        model(x)
    model.zero_grad()
    model(x).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.matrix)])
def test_a_first_call_within_autocast(dtype: torch.dtype) -> None:
    budget, x = Budget(fraction=0.9, layers_fqn="0"), torch.randn(8, 16, 16)
    plain, model = perceptron(), budget.apply(perceptron())
    for rows in (x[:4], x, x[:2]):
        for each in (plain, model):
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype):
                loss = each(rows).square().mean()
            loss.backward()
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (plain, model))))


def test_a_plan_holds_in_float64_too(plan_file: Path) -> None:
    plain, model = toy(), Budget(layers_fqn="layers", plan_file=str(plan_file)).apply(toy())
    tokens = torch.arange(16).reshape(2, 8) % 4
    assert all(map(torch.equal, gradients(plain.double(), tokens), gradients(model.double(), tokens)))


_DIFFERS = "whose operators may differ; make it again"
_OWN_BUDGET = {"budget_bytes": 7, "predicted_peak_bytes": 8}
UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "another torch": (
        {"versions": {"torch": "1.0"}},
        f"ac.plan_file: was made with torch 1.0, and this is {torch.__version__}, {_DIFFERS}",
    ),
    "a budget below its peak": (
        _OWN_BUDGET,
        "ac.plan_file: was made for a peak of 8 bytes, above its budget_bytes of 7; make it again",
    ),
    "another format": (
        {"format": "0"},
        "ac.plan_file: holds no plan of this version, 'acbench budget plan 12'; make it again",
    ),
}


@pytest.mark.parametrize(("changes", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_refusal_of_a_plan_file(
    plan_file: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(plan_file.read_text()) | changes))
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="layers", plan_file=str(other)).apply(toy())
    assert str(error.value) == message


def test_refusal_of_the_plan_of_another_model(plan_file: Path) -> None:
    model = toy()
    model.blocks = model.layers[:2]
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="blocks", plan_file=str(plan_file)).apply(model)
    assert str(error.value) == (
        "ac.plan_file: plans 'layers.0', and the blocks of this model are blocks.0, blocks.1; use a plan of "
        "this model"
    )


def test_refusal_of_the_plan_of_another_caller(plan_file: Path, tmp_path: Path) -> None:
    held = json.loads(plan_file.read_text())
    first = {**held["blocks"][0], "caller": "model", "before": [["aten.embedding.default()", 0]]}
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**held, "blocks": [first, *held["blocks"][1:]]}))
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="layers", plan_file=str(other)).apply(toy())
    assert str(error.value) == (
        "ac.plan_file: has operators of 'model', and the module that calls the blocks is ''; use a plan of "
        "this model"
    )


def test_refusal_of_a_file_that_is_not_there() -> None:
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="layers", plan_file="missing.json").apply(toy())
    assert str(error.value) == "ac.plan_file: 'missing.json' cannot be read: No such file or directory"


class _InChunks(Chunked):
    """Stands for a forward in chunks."""


def test_refusal_of_a_first_call_in_chunks() -> None:
    model = Budget(layers_fqn="layers", fraction=0.9).apply(toy())
    disguise(model.get_submodule("layers.1"), _InChunks)
    with pytest.raises(StrategyError) as error:
        train_step(model)
    assert str(error.value) == (
        "ac: 'layers.1' runs in chunks, and the first call plans for the model without them; write a plan of "
        "a step by Budget.write_plan and give it as ac.plan_file, as trials do"
    )


def test_refusal_of_call_sites() -> None:
    budget = Budget(fraction=0.5)
    with pytest.raises(StrategyError, match=r"^wrap_order: call_site makes the model one region"):
        budget.call_site(toy())


COMPILED: dict[str, tuple[str, str]] = {
    "nothing compiled": (
        "ac.executor=compiled",
        (
            "compile: none leaves nobody to carry out ac=budget ac.executor=compiled; use compile=aot_eager "
            "or inductor"
        ),
    ),
    "an eager executor": (
        "compile=aot_eager",
        (
            "compile: ac=budget ac.executor=eager follows the operators of eager blocks; use compile=none, "
            "ac.executor=compiled or ac=compiler_budget"
        ),
    ),
    "regions around compiled code": (
        "ac.executor=compiled compile=aot_eager compile_order=compile_first",
        (
            "compile_order: must be ac_first for ac.executor=compiled, whose plans are part of what is "
            "compiled, got compile_first"
        ),
    ),
    "one graph": (
        "ac.executor=compiled compile=aot_eager compile_scope=model",
        "compile_scope: must be blocks for ac.executor=compiled, which plans the graphs of blocks, got model",
    ),
    "flat parameters": (
        "ac.executor=compiled compile=aot_eager mesh=shard2 mesh.fsdp=fsdp1 mesh.use_orig_params=false",
        (
            "mesh.use_orig_params: must be true for ac=budget ac.executor=compiled: torch compiles no block "
            "whose parameters FSDP1 has made flat, got False; or use mesh.fsdp=fsdp2"
        ),
    ),
}


@pytest.mark.parametrize(("line", "message"), COMPILED.values(), ids=COMPILED)
def test_refusal_of_what_the_executor_does_not_suit(line: str, message: str) -> None:
    assert refusal_of(f"model=gpt_nano ac=budget ac.fraction=0.5 {line}") == message


def test_refusal_of_the_plan_of_the_other_executor(plan_file: Path) -> None:
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="layers", executor="compiled", plan_file=str(plan_file)).apply(toy())
    assert str(error.value) == (
        f"ac.plan_file: '{plan_file}' was made for ac.executor=eager, not compiled; use that one, or make "
        "the plan again"
    )


def test_a_compiled_executor_needs_a_plan_to_part_graphs() -> None:
    budget = Budget(layers_fqn="layers", executor="compiled", fraction=0.5)
    model = toy()
    block = type(model.layers[0])
    assert budget.apply(model) is model
    assert type(model.layers[0]) is block
    with pytest.raises(
        StrategyError, match=r"^ac\.plan_file: is needed for ac\.executor=compiled, whose plans"
    ):
        budget.partitions(model, "aot_eager")


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = x + self.down(self.dropout(self.up(x).sin()).cos())
        return outputs


def test_evaluation_with_gradients_runs_the_plain_blocks() -> None:
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Sequential(*(Dropping() for _ in range(3))))
        x = torch.randn(64, 8)
        if is_planned:
            model = Budget(fraction=0.8, layers_fqn="0").apply(model)
        for is_training in (True, False, True):
            model.train(is_training)
            model(x).sum().backward()
        found.append([*(each.grad for each in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


class ManyWritten(nn.Module):
    """A block that may write to several views at once, of which torch keeps no history under a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = [self.first(x), self.second(x)]
        if self.writes:
            torch._foreach_mul_(views, 0.5)
        outputs: torch.Tensor = views[0].sin() * views[1].sin()
        return outputs


class ManyWriting(nn.Module):
    """Several of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ManyWritten() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(x)
        return outputs


def test_writes_to_many_views_are_refused_under_a_tape(tmp_path: Path) -> None:
    budget = Budget(fraction=0.8, layers_fqn="layers", objective="flops")
    planned, x, file = budget.apply(ManyWriting()), torch.randn(4, 16, 8), tmp_path / "plan.json"
    planned(x).sum().backward()
    file.write_text(json.dumps(budget.observe(planned).plan))
    writing = ManyWriting()
    for block in writing.layers:
        cast("ManyWritten", block).writes = True
    with pytest.raises(StrategyError, match="writes to views, and torch loses that where a tape follows"):
        Budget(plan_file=str(file), layers_fqn="layers").apply(writing)(x)
