"""A trace has every operator of a step with what it reads and writes, and every collective with its group."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from harness.predict.fake_rank import step_log
from harness.predict.step_log import FakeStep, fake_step
from harness.predict.trace import CollectiveCall, HostCopy, OperatorCall
from tests.harness.composing import experiment_of

_TOKENS, _WIDTH, _HIDDEN, _VOCABULARY = 4 * 8, 16, 32, 256
_LINE = (
    f"model=mlp data=synthetic batch_size=4 sequence_length=8 model.n_layers=2 model.width={_WIDTH} "
    f"model.hidden_width={_HIDDEN} model.vocab_size={_VOCABULARY}"
)


def _step(line: str) -> FakeStep:
    return fake_step(step_log(experiment_of(f"{_LINE} {line}"), "cpu"), "cpu")


@pytest.fixture(scope="module")
def full() -> FakeStep:
    return _step("ac=full optimizer=sgd")


def test_its_flops_are_those_of_the_record(full: FakeStep) -> None:
    flops: Counter[str] = Counter()
    recomputed = 0
    for call in full.trace.operators:
        flops[call.phase] += call.flops * call.count
        recomputed += call.flops * call.count * call.is_recomputed
    assert flops["forward"] == full.work.forward_flops
    assert flops["backward"] == full.work.backward_flops
    assert recomputed == full.work.recomputed_flops


def _found(step: FakeStep, phase: str, name: str) -> list[OperatorCall]:
    return [call for call in step.trace.operators if (call.phase, call.name) == (phase, name)]


def test_an_operator_reads_its_operands_and_writes_its_result(full: FakeStep) -> None:
    (up, down, head) = _found(full, "forward", "aten.addmm.default")
    assert (up.count, down.count, head.count) == (2, 2, 1)
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
    moved = {way: _bytes(step.trace.host_copies, way) for way in ("to_host", "to_device")}
    assert moved["to_host"] == step.observation.offloaded_bytes > 0
    assert moved["to_device"] == moved["to_host"]


def _bytes(copies: tuple[HostCopy, ...], direction: str) -> int:
    return sum(copy.nbytes * copy.count for copy in copies if copy.direction == direction)


def test_a_collective_has_its_group() -> None:
    experiment = experiment_of(f"{_LINE} mesh=hsdp2x2")
    step = fake_step(step_log(replace(experiment, mesh=replace(experiment.mesh, nodes=2)), "cpu"), "cpu")
    groups = {(call.name, call.group_size, call.crosses_nodes) for call in step.trace.collectives}
    assert groups == {("all_gather", 2, False), ("reduce_scatter", 2, False), ("all_reduce", 2, True)}
    for phase, payload in step.work.collective_bytes.items():
        assert sum(payload.values()) == _payload(step.trace.collectives, phase)


def _payload(calls: tuple[CollectiveCall, ...], phase: str) -> int:
    return sum(call.payload_bytes * call.count for call in calls if call.phase == phase)
