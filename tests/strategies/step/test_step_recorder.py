"""A recorded step has each operator with what it reads and writes, and each collective with its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.predict.fake_rank import step_log
from harness.predict.step_log import FakeStep, fake_step
from strategies.step.position import Position
from strategies.step.step_recorder import OperatorWork, StepRecorder
from tests.harness.composing import experiment_of

_TOKENS, _WIDTH, _HIDDEN, _VOCABULARY = 4 * 8, 16, 32, 256
_LINE = (
    f"model=mlp data=synthetic batch_size=4 sequence_length=8 model.n_layers=2 model.width={_WIDTH} "
    f"model.hidden_width={_HIDDEN} model.vocab_size={_VOCABULARY}"
)


def _step(line: str) -> FakeStep:
    return fake_step(step_log(experiment_of(f"{_LINE} {line}")))


@pytest.fixture(scope="module")
def full() -> FakeStep:
    return _step("ac=full optimizer=sgd")


def test_its_flops_are_those_of_the_record(full: FakeStep) -> None:
    flops: Counter[str] = Counter()
    recomputed = 0
    for call, count in full.trace.operators.items():
        flops[call.phase] += call.flops * count
        recomputed += call.flops * count * call.is_recomputed
    assert flops["forward"] == full.work.forward_flops
    assert flops["backward"] == full.work.backward_flops
    assert recomputed == full.work.recomputed_flops


def _found(step: FakeStep, phase: str, name: str) -> list[OperatorWork]:
    return [call for call in step.trace.operators if (call.phase, call.name) == (phase, name)]


def test_an_operator_reads_its_operands_and_writes_its_result(full: FakeStep) -> None:
    (up, down, head) = _found(full, "forward", "aten.addmm.default")
    assert [full.trace.operators[each] for each in (up, down, head)] == [2, 2, 1]
    assert up.read_bytes == 4 * (_HIDDEN + _TOKENS * _WIDTH + _WIDTH * _HIDDEN)
    assert up.written_bytes == 4 * _TOKENS * _HIDDEN
    assert up.dtype == "float32"


def test_an_embedding_reads_the_rows_that_it_gives(full: FakeStep) -> None:
    (embedding,) = _found(full, "forward", "aten.embedding.default")
    assert embedding.written_bytes == 4 * _TOKENS * _WIDTH
    assert embedding.read_bytes == embedding.written_bytes + 8 * _TOKENS


def test_views_and_allocations_are_no_work(full: FakeStep) -> None:
    names = {call.name for call in full.trace.operators}
    assert not names & {
        "aten.view.default",
        "aten.t.default",
        "aten.detach.default",
        "aten.empty_like.default",
    }


def test_offloading_copies_to_the_host_and_back() -> None:
    step = _step("ac=offload")
    moved: Counter[str] = Counter()
    for call, count in step.trace.operators.items():
        moved[call.host_copy] += count * call.written_bytes
    assert moved["to_host"] == step.observation.offloaded_bytes > 0
    assert moved["to_device"] == moved["to_host"]


def test_a_collective_has_its_group() -> None:
    step = fake_step(step_log(experiment_of(f"{_LINE} mesh=hsdp2x2")))
    groups: set[tuple[str, tuple[int, ...]]] = set()
    payload: Counter[str] = Counter()
    for call, count in step.trace.operators.items():
        if call.collective is not None:
            groups.add((call.collective.name, call.collective.ranks))
            payload[call.phase] += count * call.collective.payload_bytes
    assert groups == {("all_gather", (0, 1)), ("reduce_scatter", (0, 1)), ("all_reduce", (0, 2))}
    counted = {phase: sum(by_name.values()) for phase, by_name in step.work.collective_bytes.items()}
    assert payload == Counter(counted)


def _sparse() -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2), check_invariants=False
    )


@pytest.mark.parametrize(
    ("run", "name"),
    [
        pytest.param(lambda: _sparse().to(torch.float64), "_to_copy.default", id="a sparse tensor is cast"),
        pytest.param(lambda: _sparse().copy_(_sparse()), "copy_.default", id="one is written to"),
        pytest.param(lambda: torch.ones(2, 0).to(torch.float64), "_to_copy.default", id="no elements"),
        pytest.param(lambda: torch.ops.aten.mm(torch.eye(2), mat2=torch.eye(2)), "mm.default", id="by name"),
    ],
)
def test_an_unusual_call_is_recorded(run: Callable[[], Tensor], name: str) -> None:
    with StepRecorder(Position(), device="cpu") as recorder:
        run()
    (call,) = [each for each in recorder.operators if each.name == f"aten.{name}"]
    assert (call.work.dtype, call.work.host_copy) == ("float32", "")


def test_a_sparse_gradient_is_cast_under_the_recorder() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with StepRecorder(Position(), device="cpu") as recorder:
        table(torch.tensor([1, 2])).sum().backward()
        assert table.weight.grad is not None
        table.weight.grad.to(torch.bfloat16)
    # two rows of four float32 and two int64 are read, two rows of bfloat16 are written with their places
    cast = recorder.operators[-1]
    assert (cast.work.read_bytes, cast.work.written_bytes) == (2 * 4 * 4 + 2 * 8, 2 * 4 * 2 + 2 * 8)
