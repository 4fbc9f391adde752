"""What every operator must pass: the dense one is torch's, and all candidates do what they promise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.torch_version import TorchVersion

from strategies.shard.candidates.derivation import derive
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.operation import LocalOperands
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.catalogue import OPERATORS
from strategies.shard.operators.convolution_and_embedding import conv2d, embedding
from strategies.shard.operators.matrix_products import bmm
from strategies.shard.operators.norms import batch_norm
from strategies.shard.operators.views import view
from tests.counted_collectives import promised
from tests.covering import marked
from tests.rank_pool import RankPool
from tests.strategies.shard.candidates.verification import draw
from tests.strategies.shard.operators.operator_cases import CASES, F64, MESH, Case
from tests.strategies.shard.shard_ranks import Examined, dtensor_runs, examine


def test_every_operator_of_the_table_has_a_case() -> None:
    """A case is named after its operator; `linear` has its cases in test_execution and test_linear."""
    assert {name.replace(",", "").partition(" ")[0] for name in CASES} | {"linear"} == set(OPERATORS)


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


@cache  # two tests look at one run
def _examined(pool4: RankPool, name: str) -> list[list[Examined]]:
    return pool4.run(examine, CASES[name].candidates, MESH)


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_equals_the_dense_operator(pool4: RankPool, name: str) -> None:
    names = [candidate.name for candidate in CASES[name].candidates]
    for found in _examined(pool4, name):
        assert {each: wrong for each, (wrong, _) in zip(names, found, strict=True) if wrong} == {}


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_communicates_what_it_promises(pool4: RankPool, name: str) -> None:
    for found in _examined(pool4, name):
        for candidate, (_, measured) in zip(CASES[name].candidates, found, strict=True):
            assert measured == promised(candidate.communication), candidate.name


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="the table says what DTensor of torch 2.13 has, older releases have less",
)
@pytest.mark.parametrize("name", CASES)
def test_dtensor_takes_the_same_placements_to_the_same_output(pool4: RankPool, name: str) -> None:
    case = CASES[name]
    assert pool4.run(dtensor_runs, name, timeout_s=60.0)[0] == {
        candidate.name: (0, [output.computed for output in candidate.outputs])
        for candidate in case.candidates
        if case.in_dtensor(candidate.choices)
    }


def _outputs(case: Case) -> dict[object, ShardingCandidate]:
    """Return one candidate for each output of a case that no rank has whole."""
    return {
        (len(each.output.spec), each.output.computed, each.output.placements): each
        for each in case.candidates
        if each.output.spec != "R" * len(each.output.spec)
    }


ELSEWHERE = [(name,) for name, case in CASES.items() if len(case.candidates[0].outputs) == 1]


def _first_of_each() -> Iterator[tuple[str]]:
    """Yield the cases with an operator or an output that no case before them has."""
    seen: set[object] = set()
    for (name,) in ELSEWHERE:
        shown = {name.partition(" ")[0], *_outputs(CASES[name])}
        if not shown <= seen:
            yield (name,)
        seen |= shown


@pytest.mark.parametrize("name", marked(ELSEWHERE, [*_first_of_each()]))
def test_an_output_may_be_wanted_whole(pool4: RankPool, name: str) -> None:
    gathered = [
        derive(each.operation, each.choices, MESH, name=each.name, output=(Replicate(), Replicate()))
        for each in _outputs(CASES[name]).values()
    ]
    right = [((), promised(candidate.communication)) for candidate in gathered]
    assert pool4.run(examine, gathered, MESH) == [right] * 4


OTHER_MESHES: dict[str, tuple[tuple[int, ...], tuple[ShardingCandidate, ...]]] = {
    "embedding on one axis": ((4,), candidates(embedding((4, 4), 16, 8).typed(F64), (4,), "complete")),
    "embedding on three axes": (
        (2, 1, 2),
        candidates(embedding((4,), 16, 8, padding_idx=13).typed(F64), (2, 1, 2), "complete"),
    ),
    "batch_norm on one axis": ((4,), candidates(batch_norm((4, 8)).typed(F64), (4,))),
    "batch_norm on three axes": ((1, 2, 2), candidates(batch_norm((4, 8, 3)).typed(F64), (1, 2, 2))),
    "conv2d on one axis": ((4,), candidates(conv2d((4, 4, 5, 5), (8, 4, 3, 3)).typed(F64), (4,))),
    "bmm on three axes": ((2, 2, 1), candidates(bmm((4, 4, 4), (4, 4, 4)).typed(F64), (2, 2, 1), "complete")),
    "view on one axis": ((4,), candidates(view((8, 4), (4, 8)).typed(F64), (4,))),
}


@pytest.mark.parametrize(("mesh", "found"), OTHER_MESHES.values(), ids=OTHER_MESHES)
def test_other_meshes(pool4: RankPool, mesh: tuple[int, ...], found: tuple[ShardingCandidate, ...]) -> None:
    right = [((), promised(candidate.communication)) for candidate in found]
    assert pool4.run(examine, found, mesh) == [right] * 4
