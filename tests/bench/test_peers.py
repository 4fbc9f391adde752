"""Peers on a tiny model: their bytes and FLOPs are exact, and ours at their peak keeps the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.peers import blockwise, libraries, rotor
from bench.peers.against import brief, summary
from bench.peers.blockwise import Schedule
from bench.peers.compared import Compared, Comparison
from bench.peers.figure import chart
from bench.peers.head_loss import ways
from bench.peers.rotor import BlockSizes
from bench.peers.workload import Peer, Workload
from harness.trial.assemble import Assembled

TINY = Workload(
    "tiny",
    (
        "model=gpt_nano",
        "model.n_layers=4",
        "model.width=32",
        "model.hidden_width=64",
        "model.max_positions=32",
        "batch_size=8",
        "sequence_length=32",
        "mesh.device=cpu",
        "ac=none",
    ),
)

TOKENS = 8 * 32

BLOCK_FLOPS = 2 * TOKENS * (4 * 32**2 + 2 * 32 * 64) + 2 * 2 * TOKENS * 32 * 32
"""Of a block's forward: four projections, two linears, scores and values of attention."""

LAST_FLOPS = 2 * TOKENS * 64 * 32
"""Of the last linear of a block, which torch's early stop leaves out."""


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Comparison(TINY, turns=0)
    torch.set_num_threads(threads)


def _nested(workload: Workload, trainee: Assembled) -> None:
    rows = (((0,), 1), 2, (3,))
    blockwise.run_by(workload, trainee, lambda blocks: blockwise.Scheduled(list(blocks), rows))


FULL, *_, CHEN = blockwise.peers(4)


@pytest.mark.parametrize(
    ("peer", "blocks", "checkpoints", "verdict"),
    [
        pytest.param(FULL, 4, 4, "ahead", id="every block"),
        pytest.param(CHEN, 2, 1, "ahead", id="the first of two rows"),
        pytest.param(Peer(name="nested", change=_nested), 4, 3, "ahead", id="a block in a row"),
    ],
)
def test_peers_recompute_exactly_their_blocks(
    comparison: Comparison, peer: Peer, blocks: int, checkpoints: int, verdict: str
) -> None:
    found = comparison.of(peer)
    again = blocks * BLOCK_FLOPS - checkpoints * LAST_FLOPS
    assert found.extra == pytest.approx(100 * again / comparison.plain.flops, rel=1e-12)
    assert found.peak_bytes is not None
    assert found.ours_bytes is not None
    assert found.bound is not None
    assert found.ours is not None
    assert found.ours_bytes <= found.peak_bytes < found.plain_bytes
    assert found.bound <= found.ours + 1e-9
    assert (found.difference, found.ours_difference, found.verdict) == (0.0, 0.0, verdict)


@pytest.mark.filterwarnings("ignore:The .grad attribute of")  # torch's compiler does it
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_compiled_peer_meets_a_compiled_plan_where_none_is_eager(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(name="compiler", overrides=("compile=aot_eager", "ac=compiler_budget", "ac.budget=0.1"))
    monkeypatch.setattr(comparison.ours, "at", lambda _: None)
    found = comparison.of(peer)
    assert found.peak_bytes is not None
    assert found.ours_bytes is not None
    assert found.extra is not None
    assert found.ours is not None
    assert found.ours_bytes <= found.peak_bytes < found.plain_bytes
    assert 0 < found.ours <= found.extra
    assert (found.executor, found.ours_difference) == ("compiled", 0.0)


SIZES = [BlockSizes(input_bytes=10, saved_bytes=100)] * 4


@pytest.mark.parametrize(
    ("budget_bytes", "schedule"),
    [
        pytest.param(450, (0, 1, 2, 3), id="all fit"),
        pytest.param(345, (0, 1, (2,), 3), id="one block waits"),
        pytest.param(130, ((0,), (1,), (2,), 3), id="each waits but the last"),
        pytest.param(112, ((((0,), 1), 2), 3), id="no room for a second input"),
        pytest.param(90, None, id="not even one fits"),
    ],
)
def test_rotor_takes_the_cheapest_schedule(budget_bytes: int, schedule: Schedule | None) -> None:
    assert rotor.best_schedule(SIZES, budget_bytes) == schedule


def test_less_to_choose_from_is_never_cheaper(comparison: Comparison) -> None:
    found = comparison.ours.ablation(0.75)
    costs = (found.greedy, found.uniform, found.whole_blocks)
    assert found.bound is not None
    assert found.exact is not None
    assert 0 <= found.bound <= found.exact + 1e-9
    assert all(cost is None or cost >= found.exact - 1e-9 for cost in costs)


def test_a_missing_package_is_a_row_that_says_so(comparison: Comparison) -> None:
    peer = Peer(name="absent", change=lambda _, __: libraries.imported("acbench_has_no_such_package"))
    found = comparison.of(peer)
    assert found.reason == "not installed: No module named 'acbench_has_no_such_package'"
    assert found.verdict == "not run"


ROW = Compared(
    workload="w", peer="p", setting="s", plain_bytes=100, peak_bytes=50, extra=9.0, bound=5.0, ours=6.0
)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        pytest.param(ROW, "ahead", id="ours computes less"),
        pytest.param(replace(ROW, ours=9.04), "equal", id="within the width of a tie"),
        pytest.param(replace(ROW, ours=9.1), "behind", id="ours computes more"),
        pytest.param(replace(ROW, ours=None), "no plan", id="no plan at that peak"),
        pytest.param(replace(ROW, extra=None, ours=None), "not run", id="the peer did not run"),
    ],
)
def test_the_verdict_says_where_ours_stands(row: Compared, verdict: str) -> None:
    assert row.verdict == verdict


def test_few_numbers_of_a_row_are_rounded() -> None:
    row = replace(ROW, extra=9.00004, difference=0.0, executor="eager")
    assert brief([row]) == {"w": {"p, s": [0.5, 9.0, 6.0, 0.0, "eager"]}}


def test_the_summary_names_the_worst_gap() -> None:
    rows = [ROW, replace(ROW, peer="better", setting="", ours=10.0), replace(ROW, ours=None)]
    assert summary(rows) == (
        "w: 1 ahead, 0 equal, 1 behind, 1 no plan, 0 not run; least gain over better: -1.00 points at a peak "
        "of 0.500 of the plain one"
    )


def test_the_figure_has_a_point_for_each_peer_that_ran() -> None:
    row = {"workload": "w", "peer": "p", "peak_bytes": 50, "plain_bytes": 100, "extra": 9.0}
    row |= {"time": {"median": 1.5}, "ours_time": None}
    curve = {"workload": "w", "share": 0.5, "exact": 6.0, "bound": None, "greedy": 7.0, "uniform": None}
    made = chart([row, {**row, "peak_bytes": None}], [curve])
    costs, times = made["vconcat"][0]["hconcat"]
    assert costs["layer"][0]["data"]["values"] == [{"peak": 50.0, "who": "p", "value": 9.0}]
    assert [each["value"] for each in costs["layer"][1]["data"]["values"]] == [6.0, 7.0]
    assert times["layer"][0]["data"]["values"] == [{"peak": 50.0, "who": "p", "value": 1.5}]


def test_losses_of_others_stand_beside_ours() -> None:
    rows = {row.way: row for row in ways((2, 24, 8), 128, [0.1], turns=0)}
    assert {"Liger", "CCE"} <= {name for name, row in rows.items() if row.reason == "needs triton, CUDA"}
    planned = rows["chunk=budget 10%"]
    assert planned.share is not None
    assert planned.share <= 0.1
    assert planned.difference is not None
    assert planned.difference < 1e-5
