from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as values

from harness.errors import ConfigError
from harness.experiment.mesh import SHARDING_STRATEGIES, Mesh


@pytest.mark.parametrize(
    ("mesh", "label", "world_size", "dp", "is_sharded"),
    [
        (Mesh(), "single", 1, 1, False),
        (Mesh(dp_replicate=2), "ddp2", 2, 2, False),
        (Mesh(dp_shard=4), "shard4", 4, 4, True),
        (Mesh(dp_replicate=2, dp_shard=3), "hsdp2x3", 6, 6, True),
        (Mesh(tp=2), "tp2", 2, 1, False),
        (Mesh(dp_shard=2, tp=2), "shard2_tp2", 4, 2, True),
        (Mesh(dp_replicate=2, tp=2), "ddp2_tp2", 4, 2, True),
        (Mesh(cp=2), "cp2", 2, 1, False),
        (Mesh(dp_replicate=2, cp=2), "ddp2_cp2", 4, 2, False),
        (Mesh(dp_shard=2, cp=2, tp=2), "shard2_cp2_tp2", 8, 2, True),
        (Mesh(cp=2, tp=2, sp=True), "cp2_sp_tp2", 4, 1, True),
        (Mesh(tp=2, sp=True), "sp_tp2", 2, 1, False),
        (Mesh(dp_shard=2, tp=2, sp=True, loss_parallel=True), "shard2_sp_tp2", 4, 2, True),
        (Mesh(dp_replicate=2, dp_shard=2, tp=2), "hsdp2x2_tp2", 8, 4, True),
        (Mesh(pp=2), "pp2", 2, 1, False),
        (Mesh(dp_shard=2, pp=2), "shard2_pp2", 4, 2, True),
        (Mesh(dp_replicate=2, pp=2, tp=2), "ddp2_pp2_tp2", 8, 2, True),
        (Mesh(pp=2, cp=2), "pp2_cp2", 4, 1, False),
        (Mesh(pp=2, cp=2, pp_schedule="zbv", reshard_after_forward=False), "pp2_cp2", 4, 1, True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_numbers_mean(mesh: Mesh, label: str, world_size: int, dp: int, is_sharded: bool) -> None:
    assert (mesh.label, mesh.world_size, mesh.dp, mesh.is_sharded) == (label, world_size, dp, is_sharded)


def test_ranks_are_spread_over_nodes() -> None:
    assert Mesh(dp_shard=8, nodes=2).ranks_per_node == 4


def test_places_of_ranks() -> None:
    mesh = Mesh(dp_replicate=2, pp=2, dp_shard=2, tp=2)
    places = itertools.product(range(2), range(2), range(2), [0], range(2))
    assert [tuple(mesh.coordinate(rank)) for rank in range(16)] == list(places)
    # ranks that differ along pp or tp alone read the same samples
    assert [mesh.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("mesh", "kinds", "balanced"),
    [
        (Mesh(dp_shard=2, cp=2, tp=2), [0] * 8, [0]),
        (Mesh(dp_replicate=2, pp=2), [0, 1, 0, 1], [0, 1]),
        (Mesh(cp=3, cp_method="ring"), [0, 1, 2], [0, 1, 2]),
        (Mesh(dp_shard=2, cp=2, cp_method="ring", tp=2), [0, 0, 1, 1] * 2, [0, 2]),
        (Mesh(pp=2, cp=2, cp_method="ring"), [0, 1, 2, 3], [0, 1, 2, 3]),
        (Mesh(dp_shard=4, ep=2, ep_capacity=1.0), [0, 1, 0, 1], [0]),
        (Mesh(dp_replicate=2, dp_shard=2, ep=2), [0, 1, 0, 1], [0]),
    ],
    ids=lambda value: value.label if isinstance(value, Mesh) else "",
)
def test_kinds_of_steps(mesh: Mesh, kinds: list[int], balanced: list[int]) -> None:
    assert [mesh.kind(rank) for rank in range(mesh.world_size)] == kinds
    assert mesh.first_ranks() == tuple(kinds.index(number) for number in range(max(kinds) + 1))
    assert mesh.first_ranks(is_balanced=True) == tuple(balanced)


@pytest.mark.parametrize(
    ("mesh", "stages"),
    [
        (Mesh(), [(0,)]),
        (Mesh(pp=2), [(0,), (1,)]),
        (Mesh(pp=2, pp_schedule="interleaved"), [(0, 2), (1, 3)]),
        (Mesh(pp=2, pp_schedule="interleaved", pp_stages_per_rank=3), [(0, 2, 4), (1, 3, 5)]),
        (Mesh(pp=2, pp_schedule="zero_bubble", pp_stages_per_rank=1), [(0,), (1,)]),
        (Mesh(pp=3, pp_schedule="zbv"), [(0, 5), (1, 4), (2, 3)]),
    ],
    ids=["no pipeline", "one each", "two each", "three each", "one of zero bubble", "there and back"],
)
def test_stages_of_ranks(mesh: Mesh, stages: list[tuple[int, ...]]) -> None:
    assert [mesh.stages_of(rank) for rank in range(mesh.pp)] == stages
    assert mesh.stages == sum(map(len, stages))


def test_a_mesh_without_a_pipeline_says_nothing_of_pipelines() -> None:
    named = ("pp", "pp_schedule", "pp_stages_per_rank", "pp_split_backward")
    assert not set(named) & set(Mesh(dp_shard=2).asked())
    assert set(named) < set(Mesh(pp=2).asked())


@given(values.tuples(values.integers(1, 8), values.integers(1, 8), values.integers(1, 8)))
def test_labels_tell_meshes_apart(numbers: tuple[int, int, int]) -> None:
    replicate, shard, tp = numbers
    label = Mesh(dp_replicate=replicate, dp_shard=shard, tp=tp).label
    same = [
        other
        for other in itertools.product(range(1, 9), repeat=3)
        if Mesh(dp_replicate=other[0], dp_shard=other[1], tp=other[2]).label == label
    ]
    assert same == [numbers]


@pytest.mark.parametrize("strategy", SHARDING_STRATEGIES)
def test_every_sharding_strategy_has_a_mesh(strategy: str) -> None:
    replicate = 2 if "HYBRID" in strategy else 1
    Mesh(fsdp="fsdp1", dp_replicate=replicate, dp_shard=2, sharding_strategy=strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_replicate": 0}, "mesh.dp_replicate: must be at least 1, got 0"),
        ({"dp_shard": -1}, "mesh.dp_shard: must be at least 1, got -1"),
        ({"tp": 0}, "mesh.tp: must be at least 1, got 0"),
        ({"nodes": 0}, "mesh.nodes: must be at least 1, got 0"),
        ({"ep": 0}, "mesh.ep: must be at least 1, got 0"),
        ({"cp": 0}, "mesh.cp: must be at least 1, got 0"),
        (
            {"cp": 2, "cp_method": "rings"},
            "mesh.cp_method: must be one of gather, ring, ulysses, torch, got 'rings'",
        ),
        ({"nodes": 2}, "mesh.nodes: must divide the 1 ranks of single, got 2"),
        ({"nodes": 3, "dp_shard": 2}, "mesh.nodes: must divide the 2 ranks of shard2, got 3"),
        ({"fsdp": "fsdp3"}, "mesh.fsdp: must be one of fsdp2, fsdp1, got 'fsdp3'"),
        ({"pp": 0}, "mesh.pp: must be at least 1, got 0"),
        (
            {"pp_schedule": "dualpipe"},
            ("mesh.pp_schedule: must be one of gpipe, 1f1b, interleaved, zero_bubble, zbv, got 'dualpipe'"),
        ),
        (
            {"pp": 2, "pp_stages_per_rank": 2},
            "mesh.pp_stages_per_rank: must be 1 for mesh.pp_schedule=1f1b, got 2",
        ),
        (
            {"pp": 2, "pp_schedule": "interleaved", "pp_stages_per_rank": 1},
            "mesh.pp_stages_per_rank: must be at least 2 for mesh.pp_schedule=interleaved, got 1",
        ),
        (
            {"pp": 2, "pp_schedule": "zbv", "pp_stages_per_rank": 4},
            "mesh.pp_stages_per_rank: must be 2 for mesh.pp_schedule=zbv, got 4",
        ),
        ({"device": "tpu"}, "mesh.device: must be one of auto, cuda, cpu, got 'tpu'"),
        (
            {"sharding_strategy": "ZERO3"},
            (
                "mesh.sharding_strategy: must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, "
                "_HYBRID_SHARD_ZERO2, got 'ZERO3'"
            ),
        ),
    ],
)
def test_refuses_what_is_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Mesh(**options)  # type: ignore[arg-type]
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (options, f"mesh.{name}: is an option of FSDP, but {label} shards nothing; use mesh=shard2")
            for (name, value), (label, numbers) in itertools.product(
                {
                    "fsdp": "fsdp1",
                    "cpu_offload": True,
                    "reshard_after_forward": False,
                    "use_orig_params": False,
                    "sharding_strategy": "NO_SHARD",
                }.items(),
                {"single": {}, "ddp2": {"dp_replicate": 2}, "tp2": {"tp": 2}}.items(),
            )
            for options in [{name: value, **numbers}]
        ),
        (
            {"dp_shard": 2, "cp_method": "ring"},
            "mesh.cp_method: needs mesh.cp above 1, got shard2; use mesh=cp2",
        ),
        (
            {"dp_shard": 2, "cp": 2, "fsdp": "fsdp1"},
            "mesh.fsdp: fsdp1 does not compose with cp > 1; use mesh.fsdp=fsdp2",
        ),
        (
            {"dp_shard": 2, "pp": 2, "fsdp": "fsdp1", "reshard_after_forward": False},
            (
                "mesh.fsdp: fsdp1 does not compose with pp > 1: torch's stages know fsdp2 and DDP; use "
                "mesh.fsdp=fsdp2"
            ),
        ),
        (
            {"dp_shard": 2, "ep_capacity": 1.5},
            "mesh.ep_capacity: needs mesh.ep above 1, got shard2; use mesh=ep2",
        ),
        (
            {"dp_shard": 2, "cp": 2, "ep": 3},
            (
                "mesh.ep: must divide the 4 ranks of mesh.dp_shard x mesh.cp, which share the experts, got "
                "3; use mesh.ep=4, or mesh.dp_shard=3"
            ),
        ),
        (
            {"dp_shard": 2, "cp": 4, "ep": 2},
            "mesh.ep: must be a multiple of mesh.cp, 4, whose ranks share experts too, got 2; use mesh.ep=8",
        ),
        (
            {"dp_shard": 2, "ep": 2, "tp": 2, "sp": True},
            "mesh.sp: does not suit mesh.ep=2, whose routers read whole sequences; use false",
        ),
        (
            {"dp_shard": 2, "ep": 2, "fsdp": "fsdp1"},
            "mesh.fsdp: fsdp1 does not compose with ep > 1; use mesh.fsdp=fsdp2",
        ),
        *(
            (
                {"dp_shard": 2, "ep": 2, "ep_capacity": capacity},
                f"mesh.ep_capacity: must be above 0, or null to drop no token, got {capacity}",
            )
            for capacity in (0.0, float("nan"), float("inf"))
        ),
        (
            {"dp_shard": 2, "cp": 2, "ep": 2, "ep_capacity": 1.0},
            (
                "mesh.ep_capacity: must be null for mesh.cp=2, whose parts of a sequence would drop other "
                "tokens, got 1.0; or use mesh.cp=1 without its options"
            ),
        ),
        ({"sp": True}, "mesh.sp: needs mesh.tp above 1, got single; use mesh=tp2"),
        (
            {"dp_shard": 2, "loss_parallel": True},
            "mesh.loss_parallel: needs mesh.tp above 1, got shard2; use mesh=tp2",
        ),
        (
            {"dp_shard": 2, "sharding_strategy": "NO_SHARD"},
            (
                "mesh.sharding_strategy: belongs to fsdp1, got NO_SHARD with fsdp2; "
                "use mesh.reshard_after_forward"
            ),
        ),
        (
            {"dp_shard": 2, "use_orig_params": False},
            "mesh.use_orig_params: belongs to fsdp1: fsdp2 always has them; use mesh.fsdp=fsdp1",
        ),
        (
            {"dp_shard": 2, "fsdp": "fsdp1", "reshard_after_forward": False},
            (
                "mesh.reshard_after_forward: belongs to fsdp2; with fsdp1 use "
                "mesh.sharding_strategy=SHARD_GRAD_OP"
            ),
        ),
        (
            {"dp_shard": 2, "tp": 2, "fsdp": "fsdp1"},
            "mesh.fsdp: fsdp1 does not compose with tp > 1; use mesh.fsdp=fsdp2",
        ),
        (
            {"dp_shard": 2, "dp_replicate": 2, "fsdp": "fsdp1"},
            (
                "mesh.sharding_strategy: FULL_SHARD does not fit hsdp2x2; HYBRID_SHARD and "
                "_HYBRID_SHARD_ZERO2 need dp_replicate > 1 and dp_shard > 1, the others dp_replicate of 1"
            ),
        ),
        (
            {"pp_schedule": "gpipe"},
            (
                "mesh.pp_schedule: is an option of pipelines, but single has one stage; leave it out, or use "
                "mesh=pp2"
            ),
        ),
        (
            {"pp": 2, "pp_split_backward": False},
            ("mesh.pp_split_backward: false has no effect: 1f1b takes backward as a whole; leave it at true"),
        ),
        (
            {"pp": 2, "dp_shard": 2, "fsdp": "fsdp1"},
            (
                "mesh.fsdp: fsdp1 does not compose with pp > 1: torch's stages know fsdp2 and DDP; "
                "use mesh.fsdp=fsdp2"
            ),
        ),
        (
            {"dp_shard": 2, "fsdp": "fsdp1", "sharding_strategy": "HYBRID_SHARD"},
            (
                "mesh.sharding_strategy: HYBRID_SHARD does not fit shard2; HYBRID_SHARD and "
                "_HYBRID_SHARD_ZERO2 need dp_replicate > 1 and dp_shard > 1, the others dp_replicate of 1"
            ),
        ),
    ],
)
def test_refuses_an_option_that_nothing_would_read(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Mesh(**options)  # type: ignore[arg-type]
    assert str(refusal.value) == message


def test_an_option_that_came_later_is_written_where_it_is_asked_for() -> None:
    usual = Mesh(tp=2).asked()
    assert not {"sp", "loss_parallel", "cp", "cp_method", "ep", "ep_capacity"} & usual.keys()
    assert Mesh(tp=2, sp=True).asked() == {**usual, "sp": True}


def test_ranks_of_a_context_read_parts_of_the_same_samples() -> None:
    mesh = Mesh(dp_shard=2, cp=2, tp=2)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [mesh.data_rank(rank) // mesh.cp for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (mesh.dp, mesh.gradient_ranks) == (2, 4)


@pytest.mark.parametrize(
    ("mesh", "whole"),
    [
        pytest.param(Mesh(dp_shard=2, cp=2, tp=2), Mesh(dp_shard=2, tp=2), id="shards"),
        pytest.param(Mesh(cp=2, cp_method="ring", sync="last", nodes=2), Mesh(), id="nothing to reduce"),
        pytest.param(
            Mesh(cp=2, tp=2, reshard_after_forward=False), Mesh(tp=2), id="nothing that FSDP would shard"
        ),
        pytest.param(
            Mesh(dp_replicate=2, cp=2, sync="last"), Mesh(dp_replicate=2, sync="last"), id="replicas"
        ),
        pytest.param(
            Mesh(dp_replicate=2, cp=2, pp=2, pp_schedule="zbv", reshard_after_forward=False),
            Mesh(dp_replicate=2),
            id="stages",
        ),
        pytest.param(Mesh(dp_shard=2, ep=2, ep_capacity=1.5), Mesh(dp_shard=2), id="experts"),
        pytest.param(Mesh(cp=2, ep=2, reshard_after_forward=False), Mesh(), id="experts of parts"),
    ],
)
def test_a_dense_mesh_has_no_option_that_nothing_reads(mesh: Mesh, whole: Mesh) -> None:
    assert mesh.dense() == whole


@pytest.mark.parametrize(
    ("mesh", "label"),
    [
        (Mesh(dp_shard=2, ep=2), "ep2"),
        (Mesh(dp_shard=4, ep=2), "shard4_ep2"),
        (Mesh(dp_shard=2, cp=2, ep=2), "shard2_cp2_ep2"),
        (Mesh(dp_replicate=2, dp_shard=2, ep=2), "hsdp2x2_ep2"),
        (Mesh(cp=2, ep=2), "cp2_ep2"),
        (Mesh(pp=2, dp_shard=2, ep=2), "pp2_ep2"),
        (Mesh(pp=2, dp_shard=2, ep=2, tp=2), "pp2_ep2_tp2"),
    ],
)
def test_ranks_of_experts_are_those_of_shards(mesh: Mesh, label: str) -> None:
    assert mesh.label == label
    assert mesh.is_sharded
    assert mesh.world_size == mesh.dp * mesh.cp * mesh.pp * mesh.tp
