"""tiles: named modules in as many loops as asked for; what mixes positions is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.experiment.mesh import Mesh
from strategies import StrategyError
from strategies.chunk.tiles import Tiles
from tests.parity import cases
from tests.rank_pool import RankPool

_TOKENS = torch.arange(64).view(4, 16)


def tiled(name: str, tiles: Any, *, training: bool = True) -> Any:
    torch.manual_seed(0)
    model = cases.MODELS[name].build().train(training)
    return Tiles(tiles=tiles).apply(model, (_TOKENS,))


@pytest.mark.parametrize("count", [2, 3, 16])
def test_each_named_module_is_one_loop_over_the_sequence(count: int) -> None:
    model = tiled("llama", {"feed_forward": count})
    seen = Tiles(tiles={"feed_forward": count}).observe(model)
    assert seen.plan is not None
    plan = seen.plan["chunk"]
    found = [(each["scope"], each["size"], each["chunk_size"]) for each in plan["regions"]]
    assert found == [(f"layers.{block}", 16, -(-16 // count)) for block in range(2)]
    assert plan["predicted_peak_bytes"] < plan["unchunked_peak_bytes"]


@pytest.mark.parametrize("mesh", ["single", "shard2"])
def test_parity_within_the_tolerance_and_predicted_bytes(pool2: RankPool, mesh: str) -> None:
    case = cases.experiment(
        model="llama",
        variant="none",
        chunk="tiles",
        chunk_options={"tiles": {"*.feed_forward": 4}},
        mesh=Mesh() if mesh == "single" else cases.MESHES[mesh],
        dropout=0.1,
        parity_steps=2,
    )
    found = [cases.prove(0, case)] if mesh == "single" else pool2.run(cases.prove, case)
    assert all(differs == [] for differs in found)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(
            Tiles,
            "chunk.tiles: must be a mapping from patterns of modules to numbers of tiles, got None; "
            "for example {feed_forward: 4}",
            id="nothing",
        ),
        pytest.param(
            lambda: Tiles(tiles={"mlp": 1}),
            "chunk.tiles: must be at least 2 for 'mlp', got 1",
            id="one tile",
        ),
        pytest.param(
            lambda: tiled("llama", {"upp": 4}),
            "chunk.tiles: 'upp' matches no module inside a block; the nearest: 'attention_norm', "
            "'attention', 'feed_forward_norm', 'feed_forward', 'dropout', 'attention.wq'",
            id="no such module",
        ),
        pytest.param(
            lambda: tiled("llama", {"attention": 4}),
            "chunk.tiles: 'layers.0.attention' mixes positions, or draws random numbers for them, and cannot "
            "run in tiles; name a module inside of it",
            id="what mixes positions",
        ),
        pytest.param(
            lambda: tiled("llama", {"feed_forward": 17}),
            "chunk.tiles: is 17 for 'layers.0.feed_forward', which has 16 positions; use at most 16",
            id="more tiles than positions",
        ),
        pytest.param(
            lambda: tiled("llama", {"feed_forward": 4}, training=False),
            "chunk.tiles: is for training, and the model has no backward; use chunk=budget",
            id="no backward",
        ),
    ],
)
def test_refusals(act: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        act()
    assert str(error.value) == message
