"""Each module against the formula of its algorithm, element by element.

Shapes as in the supplement: s sequences, i j k residues, h heads, c channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness.errors import ConfigError
from harness.models import ModelSpec
from harness.models.evoformer import EvoformerSpec
from harness.models.parts.protein_trunk import (
    ColumnAttention,
    Evoformer,
    EvoformerBlock,
    GatedAttention,
    OuterProductMean,
    RowAttention,
    SharedDropout,
    TriangleAttention,
    TriangleMultiplication,
)

MakeSpec = Callable[..., ModelSpec]
Module = TypeVar("Module", bound=nn.Module)

HEADS = {"n_heads": 2, "head_width": 3}
SMALL = {
    "n_layers": 1, "msa_width": 8, "msa_heads": 2, "msa_head_width": 3, "pair_width": 6, "pair_heads": 2,
    "pair_head_width": 3, "outer_width": 2, "triangle_width": 5, "transition_factor": 2,
    "n_sequences": 3, "n_residues": 4,
}  # fmt: skip


def spec_of(make_spec: MakeSpec, **changes: Any) -> EvoformerSpec:
    spec = make_spec("evoformer", **changes)
    assert isinstance(spec, EvoformerSpec)
    return spec


def randomised(module: Module) -> Module:
    torch.manual_seed(0)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter)
    return module


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def heads(linear: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = linear(x).unflatten(-1, (-1, 3))
    return made


def attended(attention: GatedAttention, queries: Tensor, memory: Tensor, bias_hk: Tensor | float) -> Tensor:
    """Return one token's attention output: its query on keys and values of `memory`."""
    q_hc = heads(attention.wq, queries)
    k_khc, v_khc = heads(attention.wk, memory), heads(attention.wv, memory)
    scores_hk = torch.einsum("hc,khc->hk", q_hc, k_khc) / 3**0.5 + bias_hk
    y_hc = torch.einsum("hk,khc->hc", scores_hk.softmax(-1), v_khc)
    output: Tensor = attention.wo(attention.gate(queries).sigmoid() * y_hc.flatten())
    return output


def test_rows_attend_with_the_bias_of_their_pairs() -> None:
    module = randomised(RowAttention(width=8, pair_width=6, **HEADS))
    msa_sic, pair_ijc = normal(2, 4, 8), normal(4, 4, 6)
    m_sic, bias_ijh = module.norm(msa_sic), module.bias(module.pair_norm(pair_ijc))
    expected = [[attended(module.attention, row[i], row, bias_ijh[i].T) for i in range(4)] for row in m_sic]
    actual = module(msa_sic.unsqueeze(0), pair_ijc.unsqueeze(0))[0]
    torch.testing.assert_close(actual, torch.stack([torch.stack(row) for row in expected]))  # other order


def test_columns_attend_among_sequences() -> None:
    module = randomised(ColumnAttention(width=8, is_global=False, **HEADS))
    msa_sic = normal(3, 4, 8)
    assert isinstance(module.attention, GatedAttention)
    m_sic = module.norm(msa_sic)
    expected = [
        [attended(module.attention, m_sic[s, i], m_sic[:, i], 0.0) for i in range(4)] for s in range(3)
    ]
    actual = module(msa_sic.unsqueeze(0))[0]
    torch.testing.assert_close(actual, torch.stack([torch.stack(row) for row in expected]))  # other order


def test_global_columns_share_a_query() -> None:
    module = randomised(ColumnAttention(width=8, is_global=True, **HEADS))
    msa_sic = normal(3, 4, 8)
    m_sic, attention = module.norm(msa_sic), module.attention
    q_ihc = heads(attention.wq, m_sic).mean(0)
    scores_ihs = torch.einsum("ihc,sic->ihs", q_ihc, attention.wk(m_sic)) / 3**0.5
    y_ihc = torch.einsum("ihs,sic->ihc", scores_ihs.softmax(-1), attention.wv(m_sic))
    expected = attention.wo(attention.gate(m_sic).sigmoid() * y_ihc.flatten(1))
    torch.testing.assert_close(module(msa_sic.unsqueeze(0))[0], expected)  # other order


def test_outer_products_are_averaged_over_sequences() -> None:
    module = randomised(OuterProductMean(width=8, outer_width=2, pair_width=6))
    msa_sic = normal(3, 4, 8)
    left, right = module.left(module.norm(msa_sic)), module.right(module.norm(msa_sic))
    products = torch.stack([left[s, :, None, :, None] * right[s, None, :, None, :] for s in range(3)])
    expected = module.wo(products.mean(0).flatten(2))
    torch.testing.assert_close(module(msa_sic.unsqueeze(0))[0], expected)  # other order


@pytest.mark.parametrize("is_incoming", [False, True], ids=["outgoing", "incoming"])
def test_triangle_products_sum_over_the_third_residue(is_incoming: bool) -> None:
    module = randomised(TriangleMultiplication(width=6, hidden_width=5, is_incoming=is_incoming))
    pair_ijc = normal(4, 4, 6)
    z = module.norm(pair_ijc)
    a = module.left_gate(z).sigmoid() * module.left(z)
    b = module.right_gate(z).sigmoid() * module.right(z)
    if is_incoming:  # the edges ki and kj
        a, b = a.transpose(0, 1), b.transpose(0, 1)
    product = sum(a[:, None, k] * b[None, :, k] for k in range(4))
    expected = module.gate(z).sigmoid() * module.wo(module.product_norm(product))
    torch.testing.assert_close(module(pair_ijc.unsqueeze(0))[0], expected)  # other order


@pytest.mark.parametrize("is_ending", [False, True], ids=["starting node", "ending node"])
def test_triangle_attention_is_among_edges_of_one_node(is_ending: bool) -> None:
    module = randomised(TriangleAttention(width=6, is_ending=is_ending, **HEADS))
    pair_ijc = normal(4, 4, 6)
    z = module.norm(pair_ijc)
    bias = module.bias(z)

    def edge(i: int, j: int) -> Tensor:
        if is_ending:  # algorithm 14: keys kj, bias ki
            return attended(module.attention, z[i, j], z[:, j], bias[:, i].T)
        return attended(module.attention, z[i, j], z[i], bias[j].T)  # algorithm 13: keys ik, bias jk

    expected = torch.stack([torch.stack([edge(i, j) for j in range(4)]) for i in range(4)])
    torch.testing.assert_close(module(pair_ijc.unsqueeze(0))[0], expected)  # other order


def test_a_block_updates_both_in_the_order_of_algorithm_6(make_spec: MakeSpec) -> None:
    block = randomised(spec_of(make_spec, **SMALL).build().get_submodule("layers.0"))
    assert isinstance(block, EvoformerBlock)
    called: list[str] = []
    for name, child in block.named_children():
        child.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    msa, pair = block(normal(1, 3, 4, 8), normal(1, 4, 4, 6))
    assert (msa.shape, pair.shape) == ((1, 3, 4, 8), (1, 4, 4, 6))
    assert [name for name in called if not name.endswith("dropout")] == [
        "row_attention", "column_attention", "msa_transition", "outer_product_mean", "outgoing_product",
        "incoming_product", "starting_attention", "ending_attention", "pair_transition",
    ]  # fmt: skip


@pytest.mark.parametrize("dim", [1, 2], ids=["rows", "columns"])
def test_a_shared_mask_is_one_along_its_dimension(dim: int) -> None:
    torch.manual_seed(0)
    module = SharedDropout(0.5, dim=dim)
    dropped = module(torch.ones(2, 3, 4, 5))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(dropped, dropped.select(dim, 0).unsqueeze(dim).expand_as(dropped))
    ones = torch.ones(2, 3, 4, 5)
    assert module.eval()(ones) is ones


def test_the_first_sequence_makes_the_pairs(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, **SMALL)
    model = spec.build()
    assert isinstance(model, Evoformer)
    tokens = torch.randint(22, (1, 3, 4))
    _, pair = model.embed(tokens)
    changed = tokens.clone()
    changed[:, 1] = 22
    assert torch.equal(model.embed(changed)[1], pair)
    i, j = 3, 1
    expected = (
        model.left_embedding.weight[tokens[0, 0, i]]
        + model.right_embedding.weight[tokens[0, 0, j]]
        + model.position.weight[32 + i - j]
    )
    assert torch.equal(pair[0, i, j], expected)


def test_far_residues_are_as_far_as_32(make_spec: MakeSpec) -> None:
    model = spec_of(make_spec, **{**SMALL, "n_residues": 40}).build()
    assert isinstance(model, Evoformer)
    _, pair = model.embed(torch.zeros(1, 3, 40, dtype=torch.int64))
    assert torch.equal(pair[0, 0, 32], pair[0, 0, 39])
    assert not torch.equal(pair[0, 0, 31], pair[0, 0, 32])


def test_distances_have_no_direction(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, **SMALL)
    distances = spec.build()(*spec.sample_batch(2, np.random.default_rng(0)).inputs)[1]
    assert distances.shape == (2, 4, 4, 64)
    assert torch.equal(distances, distances.transpose(1, 2))


def test_samples_hide_what_the_targets_tell(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, n_sequences=4, n_residues=25)
    batch = spec.sample_batch(8, np.random.default_rng(0))
    (msa,), (hidden, bins) = batch.inputs, batch.targets
    is_masked = msa == 22
    assert is_masked.sum((1, 2)).tolist() == [15] * 8
    assert torch.equal(is_masked, hidden != -100)
    assert hidden[is_masked].min() >= 0
    assert hidden.max() < 22
    assert (bins.min(), bins.max()) == (0, 63)
    assert torch.equal(bins, bins.transpose(1, 2))
    assert not bins.diagonal(dim1=1, dim2=2).any()
    # neighbours are 3.8 angstrom apart; edges of bins are 20 / 62 apart from 2 on
    assert set(bins.diagonal(1, dim1=1, dim2=2).flatten().tolist()) == {6}


def test_one_residue_at_least_is_masked(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, n_sequences=1, n_residues=2)
    (msa,) = spec.sample_batch(4, np.random.default_rng(0)).inputs
    assert (msa == 22).sum((1, 2)).tolist() == [1] * 4


def test_the_loss_weighs_masked_residues_and_distances(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec)
    batch = spec.sample_batch(2, np.random.default_rng(0))
    outputs = torch.zeros(2, 4, 16, 23), torch.zeros(2, 16, 16, 64)
    assert spec.loss(outputs, batch).item() == pytest.approx(2 * np.log(23) + 0.3 * np.log(64))


@pytest.mark.parametrize("global_columns", [False, True], ids=["evoformer", "extra msa"])
def test_flops_of_both_kinds_are_those_of_the_operators(make_spec: MakeSpec, global_columns: bool) -> None:
    spec = spec_of(make_spec, **SMALL, global_columns=global_columns)
    model, batch = spec.build(), spec.sample_batch(2, np.random.default_rng(0))
    with FlopCounterMode(display=False) as counted:
        model(*batch.inputs)
    assert spec.flops_per_sample(1) == counted.get_total_flops() / 2


@pytest.mark.parametrize("global_columns", [False, True], ids=["evoformer", "extra msa"])
def test_every_parameter_of_both_kinds_gets_a_gradient(make_spec: MakeSpec, global_columns: bool) -> None:
    spec = spec_of(make_spec, **SMALL, global_columns=global_columns)
    torch.manual_seed(0)
    model, batch = spec.build(), spec.sample_batch(2, np.random.default_rng(0))
    spec.loss(model(*batch.inputs), batch).backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_residues": 0}, "model.n_residues: must be at least 1, got 0"),
        ({"msa_head_width": 0}, "model.msa_head_width: must be at least 1, got 0"),
        ({"outer_width": 0}, "model.outer_width: must be at least 1, got 0"),
        ({"n_tokens": 1}, "model.n_tokens: must be at least 2, got 1"),
        ({"n_bins": 1}, "model.n_bins: must be at least 2, got 1"),
        ({"dropout": -0.5}, "model.dropout: must be in [0, 1), got -0.5"),
    ],
)
def test_shapes_that_are_refused(make_spec: MakeSpec, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec("evoformer", **changes)
    assert str(refusal.value) == message
