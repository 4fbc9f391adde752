"""What every operator must pass: the dense one is torch's, and all candidates do what they promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strategies.shard.operation import LocalOperands
from strategies.shard.verification import draw
from tests.rank_pool import RankPool
from tests.strategies.shard.operator_cases import CASES, MESH, Case
from tests.strategies.shard.shard_ranks import dtensor_runs, measure_on, promised, verify_on

every_operator = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_operator
def test_candidates_are_different_and_start_with_full_replication(case: Case) -> None:
    found = case.candidates
    assert len(found) == case.count
    assert len({candidate.name for candidate in found}) == case.count
    placements = [tuple(operand.placements for operand in candidate.operands) for candidate in found]
    assert len(set(placements)) == case.count
    assert all(placement.is_replicate() for operand in placements[0] for placement in operand)
    assert found[0].communication == ()


@every_operator
def test_on_whole_operands_it_is_the_operator_of_torch(case: Case) -> None:
    operation = case.candidates[0].operation
    ours, upstream = draw(operation)
    theirs, _ = draw(operation)
    made = operation.compute(LocalOperands(tensors=ours))
    wanted = case.torch(theirs)
    made, wanted = ((each,) if isinstance(each, Tensor) else each for each in (made, wanted))
    assert [each.shape for each in made] == [torch.Size(output.shape) for output in operation.outputs]
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    torch.autograd.backward(made, upstream)
    torch.autograd.backward(wanted, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert {name: each.grad is None for name, each in ours.items()} == {
        operand.name: not operand.is_differentiable for operand in operation.inputs
    }
    gradients = [{name: each.grad for name, each in side.items()} for side in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@every_operator
def test_every_candidate_equals_the_dense_operator(pool4: RankPool, case: Case) -> None:
    names = [candidate.name for candidate in case.candidates]
    for found in pool4.run(verify_on, case.candidates, MESH):
        assert {name: each for name, each in zip(names, found, strict=True) if each} == {}


@every_operator
def test_every_candidate_communicates_what_it_promises(pool4: RankPool, case: Case) -> None:
    for found in pool4.run(measure_on, case.candidates, MESH):
        for candidate, measured in zip(case.candidates, found, strict=True):
            assert measured == promised(candidate.communication), candidate.name


@pytest.mark.parametrize("name", CASES)
def test_dtensor_takes_the_same_placements_to_the_same_output(pool4: RankPool, name: str) -> None:
    case = CASES[name]
    assert pool4.run(dtensor_runs, name)[0] == {
        candidate.name: (0, [output.computed for output in candidate.outputs])
        for candidate in case.candidates
        if case.in_dtensor(candidate.choices)
    }
