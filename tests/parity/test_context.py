"""Parts of a sequence on each rank: attention over all of them, neutral variants, mistakes that are found."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from harness.models.llama import LlamaSpec
from harness.models.parts import context_attention
from harness.models.parts.context_attention import METHODS, ContextAttention, Ring
from harness.predict.prediction import step_of
from harness.records.measured import StepBytes
from harness.trial.batches import batches
from harness.trial.parallel import split_context
from tests.parity import cases
from tests.rank_pool import RankPool

_B, _H, _G, _S, _K = 2, 4, 2, 6, 4
_SEED = 7
_METHODS = tuple(
    method for method in METHODS if method != "torch"
)  # that is tests/parity/test_torch_context.py
_MATRIX = pytest.mark.matrix
_PLANNED = {"fraction": 0.95}
_COMM = {"save_ops": ("matmul", "attention", "comm")}


def _operands() -> list[Tensor]:
    """Return queries, keys and values of whole sequences, and a gradient, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    heads = (_H, _G, _G, _H)
    return [
        torch.randn(_B, count, 2 * _S, _K, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in heads
    ]


def _own(tensor: Tensor, rank: int) -> Tensor:
    return tensor.detach()[:, :, rank * _S : (rank + 1) * _S]


def _errors(rank: int, method: str, *, is_causal: bool, dropout_p: float, has_kernel: bool) -> list[float]:
    """Return how far output and gradients of this rank's part are from those of the whole."""
    *whole, gradient = _operands()
    parts = [_own(each, rank).requires_grad_() for each in whole]
    assert dist.group.WORLD is not None
    attend = ContextAttention(method=method, ring=Ring(dist.group.WORLD, 2, rank))
    torch.manual_seed(_SEED + rank)
    with mock.patch.object(context_attention._Piece, "_has_kernel", has_kernel):
        output = attend(*parts, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=True)
        output.backward(_own(gradient, rank))
    expected = _attention(*whole, is_causal=is_causal, dropout_p=dropout_p)
    expected.backward(gradient.detach())
    pairs = [(_own(expected, rank), output)]
    pairs += [(_own(_gradient(each), rank), _gradient(part)) for each, part in zip(whole, parts, strict=True)]
    return [_relative(one, other) for one, other in pairs]


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _relative(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max() / expected.abs().max())


def _attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float) -> Tensor:
    """Return the attention of whole sequences, with the weights dropped that a ring of two drops."""
    k, v = (each.repeat_interleave(_H // _G, dim=1) for each in (k, v))
    scores = q @ k.mT * _K**-0.5
    if is_causal:
        later = torch.ones(2 * _S, 2 * _S, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    factors = torch.ones_like(scores)
    for rank in range(2) if dropout_p else ():
        torch.manual_seed(_SEED + rank)
        for turn in range(rank + 1):  # causal: later parts are skipped
            source = rank - turn
            piece = functional.dropout(torch.ones(_B, _H, _S, _S, dtype=torch.float64), dropout_p)
            factors[..., rank * _S : (rank + 1) * _S, source * _S : (source + 1) * _S] = piece
    output: Tensor = (scores.softmax(-1) * factors) @ v
    return output


@pytest.mark.parametrize(
    ("method", "is_causal", "dropout_p", "has_kernel"),
    [
        *(pytest.param(method, True, 0.0, True, id=f"{method}, causal") for method in _METHODS),
        *(pytest.param(method, False, 0.0, True, id=f"{method}, all keys") for method in _METHODS),
        pytest.param("ring", True, 0.0, False, id="ring, without a kernel"),
        pytest.param("ring", False, 0.0, False, id="ring, all keys, without a kernel"),
        pytest.param("ring", True, 0.3, True, id="ring, dropout"),
    ],
)
def test_parts_attend_as_the_whole(
    pool2: RankPool, method: str, is_causal: bool, dropout_p: float, has_kernel: bool
) -> None:
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "has_kernel": has_kernel}
    for errors in pool2.run(_errors, method, **options):
        assert max(errors) < 1e-12


def _model_errors(rank: int, method: str, variant: str, options: dict[str, Any]) -> float:
    """Return how far gradients in float64 are from those of one process, the worst of them."""
    case = cases.experiment(
        model="llama", mesh=cases.MESHES[f"cp2_{method}"], variant=variant, options=options
    )
    whole = batches(case.dense(), torch.device("cpu"), 0)(0)
    part = case.model.sequence_part(whole, rank, 2)
    found = []
    for is_dense, batch in ((True, whole), (False, part)):
        torch.manual_seed(0)
        model = case.model.build().double()
        if not is_dense:
            model = split_context(model, case, cases.devices_of(case.mesh))
            model = case.ac.apply(model, batch.inputs)
        logits = model(*batch.inputs)
        functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        found.append([_gradient(each) for each in model.parameters()])
    for gradient in found[1]:
        dist.all_reduce(gradient)
        gradient.div_(2)
    return max(_relative(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize(
    ("variant", "options"),
    [("none", {}), ("full", {}), ("nested", {}), ("selective_op", _COMM), ("offload", {})],
)
def test_gradients_in_float64_are_those_of_one_process(
    pool2: RankPool, method: str, variant: str, options: dict[str, Any]
) -> None:
    assert max(pool2.run(_model_errors, method, variant, options)) < 1e-12


# of four blocks, forward and backward, without DDP's own; what recomputation repeats is of backward
_COLLECTIVES = [
    ("gather", "all_gather", "none", {}, 8, 0, 0),
    ("gather", "all_gather", "full", {}, 8, 8, 8),
    ("gather", "all_gather", "nested", {}, 8, 12, 12),
    ("gather", "all_gather", "selective_layer", {"ac_freq": 2}, 8, 4, 4),
    ("gather", "all_gather", "selective_op", {}, 8, 8, 8),
    ("gather", "all_gather", "selective_op", _COMM, 8, 0, 0),
    ("gather", "all_gather", "offload", {}, 8, 0, 0),
    ("ulysses", "all_to_all", "none", {}, 16, 16, 0),
    ("ulysses", "all_to_all", "full", {}, 16, 32, 16),
    ("ulysses", "all_to_all", "nested", {}, 16, 40, 24),
    ("ulysses", "all_to_all", "selective_layer", {"ac_freq": 2}, 16, 24, 8),
    ("ulysses", "all_to_all", "selective_op", {}, 16, 32, 16),
    ("ulysses", "all_to_all", "selective_op", _COMM, 16, 16, 0),
    ("ulysses", "all_to_all", "offload", {}, 16, 16, 0),
    ("ring", "all_to_all", "none", {}, 4, 12, 0),
    ("ring", "all_to_all", "full", {}, 4, 16, 4),
    ("ring", "all_to_all", "nested", {}, 4, 18, 6),
    ("ring", "all_to_all", "selective_layer", {"ac_freq": 2}, 4, 14, 2),
    ("ring", "all_to_all", "selective_op", {}, 4, 16, 4),
    ("ring", "all_to_all", "selective_op", _COMM, 4, 12, 0),
    ("ring", "all_to_all", "offload", {}, 4, 12, 0),
]


@pytest.mark.parametrize(
    ("method", "name", "variant", "options", "forward", "backward", "repeated"),
    [
        pytest.param(
            *row,
            id=f"{row[0]}, {row[2]}{' with comm' if row[3] is _COMM else ''}",
            marks=() if row[2] == "full" else _MATRIX,
        )
        for row in _COLLECTIVES
    ],
)
def test_collectives_and_bytes_are_those_predicted(
    pool2: RankPool,
    method: str,
    name: str,
    variant: str,
    options: dict[str, Any],
    forward: int,
    backward: int,
    repeated: int,
) -> None:
    case = cases.experiment(
        model="llama", mesh=cases.MESHES[f"cp2_{method}"], variant=variant, options=options
    )
    assert isinstance(case.model, LlamaSpec)
    case = replace(case, model=replace(case.model, n_layers=4))
    found = pool2.run(cases.measured, case)
    for _, work in found:
        counts = [work.collectives[phase].get(name, 0) for phase in ("forward", "backward")]
        assert counts == [forward, backward]
        assert work.collectives_repeated == ({name: repeated} if repeated else {})
        assert work.collectives["backward"].get("reduce_scatter", 0) == (8 if method == "gather" else 0)
    predicted = step_of(case)
    memory, work = found[-1]  # in a ring the last rank computes most
    for part in dataclasses.fields(StepBytes):
        assert getattr(memory, part.name) == getattr(predicted.memory, part.name)
    assert work.forward_flops == predicted.work.forward_flops
    assert (work.collectives, work.collective_bytes) == (
        predicted.work.collectives,
        predicted.work.collective_bytes,
    )


_OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("moe", "selective_op", _COMM),
    ("llama", "selective_op", {}),
    ("llama", "selective_layer", {"ac_freq": 2}),
    ("llama", "offload", {}),
    ("llama", "full", {"use_reentrant": True}),
    ("llama", "full", {"rewind": True}),
]


@pytest.mark.parametrize(
    ("mesh", "model", "variant", "options"),
    [
        *(
            pytest.param(f"cp2_{method}", model, variant, {}, id=f"{method}, {model}, {variant}")
            for method in _METHODS
            for model, variant in [("llama", "full"), ("gpt", "nested")]
        ),
        *(
            pytest.param(
                f"cp2_{method}", model, variant, options, id=f"{method}, {model}, {variant}", marks=_MATRIX
            )
            for method in _METHODS
            for model, variant, options in _OTHERS
        ),
        *(
            pytest.param(f"cp2_{method}", "llama", "budget", _PLANNED, id=f"{method}, budget", marks=_MATRIX)
            for method in _METHODS
        ),
    ],
)
def test_parts_are_neutral_and_equal_the_dense_model(
    pool2: RankPool, mesh: str, model: str, variant: str, options: dict[str, Any]
) -> None:
    cases.require_neutral(
        pool2.run(
            cases.parity,
            cases.experiment(
                model=model, mesh=cases.MESHES[mesh], variant=variant, options=options, dropout=0.1,
                parity_steps=2,
            ),
        )
    )  # fmt: skip


_USUAL = [("gather", "hf_llama", "full"), ("ring", "vit", "full"), ("ulysses", "vit", "full")]


@pytest.mark.parametrize(
    ("method", "model", "variant", "options"),
    [
        pytest.param(
            method,
            model,
            variant,
            options,
            id=f"{method}, {model}, {variant}",
            marks=() if (method, model, variant) in _USUAL else _MATRIX,
        )
        for method in _METHODS
        for model, variant, options in [
            ("hf_gpt2", "selective_op", {}),
            ("hf_qwen3", "nested", {}),
            *(
                (model, variant, options)
                for model in ("vit", "hf_llama")
                for variant, options in [
                    ("none", {}),
                    ("full", {}),
                    ("selective_layer", {"ac_freq": 2}),
                    ("selective_op", {}),
                    ("nested", {}),
                    ("offload", {}),
                    ("budget", _PLANNED),
                ]
            ),
        ]
    ],
)
def test_images_and_models_of_transformers_in_parts(
    pool2: RankPool, method: str, model: str, variant: str, options: dict[str, Any]
) -> None:
    case = cases.experiment(
        model=model,
        mesh=cases.MESHES[f"cp2_{method}"],
        variant=variant,
        options=options,
        parity_steps=2,
        # with few samples the peak of so small a classifier lies in the optimizer, which no plan lowers
        batch_size=64 if variant == "budget" else 4,
    )
    cases.require_neutral(pool2.run(cases.parity, case))


@pytest.mark.parametrize("sync", ["each", "last"])
def test_micro_batches_of_parts(pool2: RankPool, sync: str) -> None:
    mesh = replace(cases.MESHES["cp2_ring"], sync=sync)
    case = cases.experiment(model="llama", mesh=mesh, dropout=0.1, parity_steps=2, microbatches=2)
    cases.require_neutral(pool2.run(cases.parity, case))


@_MATRIX
@pytest.mark.parametrize("mesh", ["shard2_cp2", "ddp2_cp2", "cp4_ring", "cp2_sp_tp2"])
def test_parts_on_meshes_of_four(pool4: RankPool, mesh: str) -> None:
    case = cases.experiment(model="llama", mesh=cases.MESHES[mesh], dropout=0.1, parity_steps=2)
    cases.require_neutral(pool4.run(cases.parity, case))
