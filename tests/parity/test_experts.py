"""Experts that ranks share: neutral variants, what is exchanged, choices that a recomputation makes anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.measure import routing
from harness.measure.routing import RoutingLog
from harness.models.moe import MoESpec
from harness.models.parts.exchange import Exchanged
from harness.models.parts.expert_dispatch import slots
from harness.models.parts.feed_forward import RoutedExperts
from harness.predict.prediction import step_of
from harness.records.measured import Routing, StepBytes
from harness.records.merge_ranks import RankRouting, Work
from harness.records.parity_result import Parity
from harness.records.verdict import verdict
from harness.trial.batches import batches
from harness.trial.parallel import split_experts
from strategies.ac.selective_op import DISPATCHING
from strategies.tracing.balanced_routing import BALANCED
from tests.parity import cases
from tests.rank_pool import RankPool

_CPU = torch.device("cpu")
_MATRIX = pytest.mark.matrix
_KEPT = {"save_ops": DISPATCHING}
_COMM = {"save_ops": ("matmul", "attention", "comm")}


_CELLS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("full", {}),
    ("selective_op", _KEPT),
    ("nested", {}),
    ("offload", {}),
    ("selective_layer", {"ac_freq": 2}),
    ("selective_op", {}),
    ("selective_op", _COMM),
    ("full", {"use_reentrant": True}),
    ("full", {"rewind": True}),
    ("full", {"early_stop": False}),
    ("full", {"offload": True}),
]


def _case(
    mesh: str, variant: str = "full", options: dict[str, Any] | None = None, **fields: Any
) -> Experiment:
    return cases.experiment(model="moe", mesh=cases.MESHES[mesh], variant=variant, options=options, **fields)


def _of_four_blocks(case: Experiment) -> Experiment:
    assert isinstance(case.model, MoESpec)
    return replace(case, model=replace(case.model, n_layers=4))


# against one process


def _errors(rank: int, mesh: str, variant: str, options: dict[str, Any]) -> float:
    """Return how far gradients in float64 are from those of one process, the worst of this rank's."""
    case = _case(mesh, variant, options)
    ranks = case.mesh.world_size
    whole = batches(replace(case, mesh=cases.MESHES["single"]), _CPU, 0)(0)
    torch.manual_seed(0)
    plain = case.model.build().double()
    torch.manual_seed(0)
    model = case.model.build().double()
    model = split_experts(model, case, cases.devices_of(case.mesh), RoutingLog())
    for module in plain.modules():
        if isinstance(module, RoutedExperts):
            module.capacity = case.mesh.ep_capacity
    own = whole.share(rank, ranks)
    model = case.ac.apply(model, own.inputs)
    # a capacity is one of each rank's share
    for share in range(ranks):
        _backward(plain, whole.share(share, ranks), ranks)
    _backward(model, own, 1)
    expected = {name: _gradient(each) for name, each in plain.named_parameters()}
    found = {name: _gradient(each) for name, each in model.named_parameters()}
    for name, gradient in found.items():
        if ".experts." not in name:
            dist.all_reduce(gradient)
            gradient.div_(ranks)
    return max(
        float((expected[name] - each).abs().max() / expected[name].abs().max())
        for name, each in found.items()
    )


def _backward(model: nn.Module, batch: Any, ranks: int) -> None:
    logits = model(*batch.inputs)
    (functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()) / ranks).backward()


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize(
    ("mesh", "variant", "options"),
    [
        pytest.param(
            mesh, variant, options, id=f"{mesh}, {variant}",
            marks=() if variant in {"none", "full"} else _MATRIX,
        )
        for mesh in ("ep2", "ep2_capacity")
        for variant, options in _CELLS[:5]
    ],
)  # fmt: skip
def test_gradients_in_float64_are_those_of_one_process(
    pool2: RankPool, mesh: str, variant: str, options: dict[str, Any]
) -> None:
    assert max(pool2.run(_errors, mesh, variant, options)) < 1e-12


def test_a_capacity_keeps_the_first_choices_of_each_expert() -> None:
    torch.manual_seed(0)
    layer = RoutedExperts(width=4, hidden_width=8, n_experts=3, top_k=2)
    layer.capacity = 0.75
    slots_Tk, most = slots(torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1]]), 3, 0.75)
    assert slots_Tk.tolist() == [[0, 0], [1, 0], [1, 2], [3, 2]]
    assert most == 2  # 0.75 of 8 choices over 3 experts
    x_BSD = torch.randn(1, 4, 4)
    weights_Tk, experts_Tk = layer.route(x_BSD[0])
    slots_Tk, _ = slots(experts_Tk, 3, 0.75)
    assert (slots_Tk >= most).any()
    for token, row in enumerate(x_BSD[0]):
        terms = [
            weights_Tk[token, choice] * layer.experts[int(experts_Tk[token, choice])](row)  # type: ignore[index]
            for choice in range(2)
            if slots_Tk[token, choice] < most
        ]
        expected = sum(terms, torch.zeros(4))
        torch.testing.assert_close(layer(x_BSD)[0, token], expected)


_MIXTURES = ["hf_mixtral", "hf_olmoe", "hf_qwen3_moe", "hf_gpt_oss", "hf_deepseek_v3"]


@pytest.mark.parametrize(
    "model",
    ["hf_gpt_oss", *(pytest.param(each, marks=_MATRIX) for each in _MIXTURES if each != "hf_gpt_oss")],
)
def test_mixtures_of_transformers_compute_as_their_own_forward(model: str) -> None:
    spec = cases.OF_TRANSFORMERS[model]
    spec.check_experts(2)
    with torch.device("meta"):
        built = spec.build()
    spec.check_dispatch(built)
    for mixture in spec.mixtures(built).values():
        mixture.module.is_transposed = model != "hf_gpt_oss"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"mesh\.ep: \w+Experts does not run two small experts"):
        spec.check_dispatch(built)


def test_experts_that_compute_otherwise_are_refused() -> None:
    spec = cases.OF_TRANSFORMERS["hf_olmoe"]
    with torch.device("meta"):
        built = spec.build()
    for mixture in spec.mixtures(built).values():
        mixture.module._apply_gate = lambda up: up.chunk(2, -1)[0]  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"mesh\.ep: OlmoeExperts computes otherwise than transformers' inter"
    ):
        spec.check_dispatch(built)


# trials


@_MATRIX
@pytest.mark.parametrize(
    ("model", "mesh", "variant", "options"),
    [
        *(
            pytest.param(model, mesh, variant, options, id=f"{model}, {mesh}, {variant}")
            for model in _MIXTURES
            for mesh in ("ep2", "ep2_capacity")
            for variant, options in [
                *_CELLS[:6],
                *([] if mesh == "ep2" else [("budget", {"fraction": 0.95})]),
            ]
        ),
        *(pytest.param(model, "cp2_ep2", "full", {}, id=f"{model}, cp2_ep2") for model in _MIXTURES[:3]),
    ],
)
def test_mixtures_of_transformers_are_neutral(
    pool2: RankPool, model: str, mesh: str, variant: str, options: dict[str, Any]
) -> None:
    case = cases.experiment(
        model=model, mesh=cases.MESHES[mesh], variant=variant, options=options, parity_steps=2
    )
    cases.require_neutral(pool2.run(cases.parity, case))


@pytest.mark.parametrize(
    ("mesh", "variant", "options"),
    [
        pytest.param("ep2", "full", {}, id="ep2, full"),
        pytest.param("ep2_capacity", "nested", {}, id="ep2_capacity, nested"),
        *(
            pytest.param(mesh, variant, options, id=f"{mesh}, {variant} {options}", marks=_MATRIX)
            for mesh in ("ep2", "ep2_capacity")
            for variant, options in _CELLS
        ),
    ],
)
def test_variants_are_neutral_and_equal_the_dense_model(
    pool2: RankPool, mesh: str, variant: str, options: dict[str, Any]
) -> None:
    cases.require_neutral(pool2.run(cases.parity, _case(mesh, variant, options, dropout=0.1, parity_steps=2)))


@_MATRIX
@pytest.mark.parametrize("order", ["outside_fsdp", "call_site"])
def test_regions_around_shards(pool2: RankPool, order: str) -> None:
    cases.require_neutral(
        pool2.run(cases.parity, _case("ep2", dropout=0.1, parity_steps=2, wrap_order=order))
    )


@_MATRIX
@pytest.mark.parametrize("dtype", ["bf16", "bf16_mixed"])
def test_half_precision(pool2: RankPool, dtype: str) -> None:
    cases.require_neutral(pool2.run(cases.parity, _case("ep2", parity_steps=2, dtype=dtype)))


@_MATRIX
@pytest.mark.parametrize("sync", ["each", "last"])
def test_micro_batches(pool2: RankPool, sync: str) -> None:
    case = _case("ep2", dropout=0.1, parity_steps=2, microbatches=2)
    cases.require_neutral(pool2.run(cases.parity, replace(case, mesh=replace(case.mesh, sync=sync))))


@_MATRIX
def test_ranks_with_parts_of_sequences_share_experts(pool2: RankPool) -> None:
    cases.require_neutral(pool2.run(cases.parity, _case("cp2_ep2", dropout=0.1, parity_steps=2)))


@_MATRIX
@pytest.mark.parametrize("mesh", ["ep4", "shard4_ep2", "hsdp2x2_ep2", "shard2_cp2_ep4"])
def test_meshes_of_four(pool4: RankPool, mesh: str) -> None:
    cases.require_neutral(pool4.run(cases.parity, _case(mesh, dropout=0.1, parity_steps=2)))


@contextmanager
def _own_gradients() -> Iterator[None]:
    """Leave gradients of experts sums over the ranks that share them."""
    exchange = Exchanged.apply
    plain = lambda *operands: exchange(*operands[:4])  # noqa: E731 (one expression)
    with mock.patch.object(Exchanged, "apply", plain):
        yield


def _with_sums(rank: int, case: Experiment) -> Parity:
    with _own_gradients():
        return cases.parity(rank, case)


def test_gradients_that_nobody_averages_differ_from_the_dense_model(pool2: RankPool) -> None:
    case = _case("ep2", "full", seed=1)  # of its own, so that no other case shares its steps
    for parity in pool2.run(_with_sums, case):
        assert parity.first is None  # the twin makes the same mistake
        assert next(iter(parity.differences())).startswith("parity: gradient of")


# of four blocks, forward and backward; what recomputation repeats is of backward
_COLLECTIVES: list[tuple[str, str, dict[str, Any], int, int, int]] = [
    ("ep2", "none", {}, 12, 8, 0),
    ("ep2", "offload", {}, 12, 8, 0),
    ("ep2", "full", {}, 12, 20, 12),
    ("ep2", "selective_layer", {"ac_freq": 2}, 12, 14, 6),
    ("ep2", "selective_op", {}, 12, 20, 12),
    ("ep2", "selective_op", _COMM, 12, 12, 4),
    ("ep2", "selective_op", _KEPT, 12, 12, 4),
    ("ep2", "nested", {}, 12, 26, 18),
    ("ep2_capacity", "none", {}, 8, 8, 0),
    ("ep2_capacity", "full", {}, 8, 16, 8),
    ("ep2_capacity", "selective_layer", {"ac_freq": 2}, 8, 12, 4),
    ("ep2_capacity", "selective_op", {}, 8, 16, 8),
    ("ep2_capacity", "selective_op", _COMM, 8, 8, 0),
    ("ep2_capacity", "selective_op", _KEPT, 8, 8, 0),
    ("ep2_capacity", "nested", {}, 8, 20, 12),
]
_IN_DEFAULT_RUN = ("ep2_capacity", "selective_op", _KEPT)  # a prediction takes seconds


@pytest.mark.parametrize(
    ("mesh", "variant", "options", "forward", "backward", "repeated"),
    [
        pytest.param(
            *row,
            id=f"{row[0]}, {row[1]} {','.join(row[2].get('save_ops', ()))}",
            marks=() if row[:3] == _IN_DEFAULT_RUN else _MATRIX,
        )
        for row in _COLLECTIVES
    ],
)
def test_collectives_are_those_predicted(
    pool2: RankPool,
    mesh: str,
    variant: str,
    options: dict[str, Any],
    forward: int,
    backward: int,
    repeated: int,
) -> None:
    case = _of_four_blocks(_case(mesh, variant, options))
    found = pool2.run(cases.measured, case)
    for _, work in found:
        counts = [work.collectives[phase]["all_to_all"] for phase in ("forward", "backward")]
        assert counts == [forward, backward]
        assert work.collectives_repeated.get("all_to_all", 0) == repeated
    predicted = step_of(case)
    memory, work = found[0]
    assert work.collectives == predicted.work.collectives
    assert work.forward_flops == predicted.work.forward_flops or mesh == "ep2"
    if mesh == "ep2":  # how many tokens come is an estimate, and says so
        assert BALANCED in predicted.assumes
        return
    assert work.collective_bytes == predicted.work.collective_bytes
    assert BALANCED not in predicted.assumes
    for part in dataclasses.fields(StepBytes):
        assert getattr(memory, part.name) == getattr(predicted.memory, part.name)


def test_a_recomputation_is_held_against_the_forward_of_its_micro_batch() -> None:
    log = RoutingLog()
    watch = log.watch("router")
    chosen = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[2, 3], [0, 1]])]
    for number, experts in enumerate(chosen):
        log.microbatch = number
        assert watch.visited(experts) is experts
    with mock.patch.object(routing, "is_backward", return_value=True):
        for number, experts in enumerate(chosen):
            log.microbatch = number
            assert watch.visited(experts) is experts
        assert log.routings() == (Routing(router="router", tokens=2),)
        assert watch.visited(chosen[0]).equal(chosen[1])
    assert log.routings() == (Routing(router="router", tokens=2, changed_tokens=2),)


def test_a_flip_is_a_verdict() -> None:
    seen = RankRouting(router="layers.1.router", tokens=32, changed_tokens=2, rank=1)
    work = Work(forward_flops=1, backward_flops=2, recomputed_flops=1, recomputed_ops={}, routing=(seen,))
    shown = verdict(saves_nothing=False, memory=None, work=work, parity=None)
    sends = "sends 2 of 32 tokens to other experts than forward"
    reason = f"routing: recomputation of 'layers.1.router' on rank 1 {sends}"
    assert (shown.word, shown.reason) == ("differs", reason)
