"""Compiled plans on meshes of several ranks: one plan, neutral, within its budget, no collective repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.trial.plan_budget import PLAN_FILE
from strategies import StrategyError
from tests.rank_pool import RankPool
from tests.strategies.budget.compiled.compiled_ranks import Examined, examined

_SMALL = (
    "model.n_layers=2 model.width=32 model.hidden_width=64 data=synthetic batch_size=8 sequence_length=64"
)
_MLP = f"compile=aot_eager model=mlp {_SMALL} ac.fraction=0.95"
_GPT = f"compile=aot_eager model=gpt_nano {_SMALL} ac.fraction=0.8"
_LLAMA = f"compile=aot_eager model=llama_nano {_SMALL} ac.fraction=0.75"


def user(factory: str, more: str) -> str:
    where = f"model.factory=tests.strategies.budget.compiled.compiled_ranks:{factory}"
    return f"compile=aot_eager model=python model.layers_fqn=blocks model.split_example=true {where} {more}"


def require_planned(found: list[Examined]) -> None:
    """Require what a compiled plan promises, of every rank."""
    assert [each.unequal for each in found] == [[]] * len(found)
    assert all(each.decisions == found[0].decisions for each in found)
    assert max(each.peak_bytes for each in found) == found[0].peak_bytes == found[0].predicted_bytes
    assert found[0].predicted_bytes <= found[0].budget_bytes < found[0].plain_bytes
    for each in found:
        assert each.recomputed_flops == each.extra_flops
        assert each.collectives == each.expected_collectives


_DEAR = pytest.mark.matrix
TWO = [
    pytest.param(f"{_MLP} mesh=ddp2", None, id="ddp2"),
    pytest.param(f"{_MLP} mesh=shard2 model.dropout=0.1", None, id="shard2, dropout"),
    pytest.param(f"{_MLP} mesh=tp2", None, id="tp2"),
    pytest.param(f"{_GPT} mesh=ddp2", 1, id="ddp2, then one row", marks=_DEAR),
    pytest.param(f"{_GPT} mesh=shard2 model.dropout=0.1", 2, id="shard2, then two rows", marks=_DEAR),
    pytest.param(f"{_GPT} mesh=tp2 model.dropout=0.1", 1, id="tp2, then one row", marks=_DEAR),
    pytest.param(f"{_LLAMA} mesh=tp2", None, id="tp2, collectives that nobody reads", marks=_DEAR),
    pytest.param(f"{_GPT} mesh=ddp2 dtype=bf16_mixed", None, id="ddp2, bf16_mixed", marks=_DEAR),
    pytest.param(f"{_GPT} mesh=shard2 dtype=bf16_mixed", None, id="shard2, bf16_mixed", marks=_DEAR),
    pytest.param(f"{_GPT} mesh=shard2 wrap_order=outside_fsdp", None, id="outside_fsdp", marks=_DEAR),
    pytest.param(
        f"{_GPT} mesh=shard2 mesh.reshard_after_forward=false", None, id="no resharding", marks=_DEAR
    ),
    pytest.param(f"{_GPT} mesh=shard2 mesh.cpu_offload=true", None, id="parameters on the host", marks=_DEAR),
    pytest.param(f"{_GPT} mesh=shard2 mesh.fsdp=fsdp1", None, id="fsdp1", marks=_DEAR),
    pytest.param(user("first_frozen", "ac.fraction=0.95 mesh=ddp2"), None, id="ddp2, the first block frozen"),
    pytest.param(
        user("second_frozen", "ac.fraction=0.9 mesh=shard2"), None, id="shard2, one frozen", marks=_DEAR
    ),
    pytest.param(user("tied", "ac.fraction=0.95 mesh=shard2"), None, id="shard2, tied", marks=_DEAR),
    pytest.param(user("wide", "ac.fraction=0.95 mesh=ddp2"), None, id="ddp2, several buckets", marks=_DEAR),
]


@pytest.mark.filterwarnings("ignore:ac=budget. a block runs other operators on smaller inputs")
@pytest.mark.parametrize(("line", "rows"), TWO)
def test_a_plan_on_two_ranks(pool2: RankPool, line: str, rows: int | None, tmp_path: Path) -> None:
    require_planned(pool2.run(examined, line, tmp_path, rows))


@pytest.mark.matrix
def test_a_plan_of_another_mesh(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(examined, f"{_MLP} mesh=ddp2", tmp_path)
    given = f"{_MLP} ac.fraction=null ac.plan_file={tmp_path / PLAN_FILE}"
    found = pool2.run(examined, f"{given} mesh=shard2", tmp_path)
    assert [each.unequal for each in found] == [[], []]
    assert all(each.recomputed_flops == each.extra_flops for each in found)
    with pytest.raises(StrategyError, match=r"^ac: the plan of 'layers\.0' was made for a graph of digest "):
        pool2.run(examined, f"{given} mesh=tp2 batch_size=4", tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["hsdp2x2", "shard2_tp2"])
def test_a_plan_on_four_ranks(pool4: RankPool, mesh: str, tmp_path: Path) -> None:
    require_planned(pool4.run(examined, f"{_GPT} mesh={mesh}", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ddp2", "shard2", "tp2"])
def test_generated_kernels_on_two_ranks(pool2: RankPool, mesh: str, tmp_path: Path) -> None:
    found = pool2.run(examined, f"{_GPT} compile=inductor mesh={mesh}", tmp_path)
    assert [each.unequal for each in found] == [[], []]
    assert all(each.peak_bytes <= each.budget_bytes for each in found)
