from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from harness.models import Batch, ModelSpec
from harness.models.parts.attention import GroupedQueryAttention, rotary_table, rotate

MakeSpec = Callable[..., ModelSpec]


def test_key_value_heads_are_fewer(make_spec: MakeSpec) -> None:
    block = make_spec("llama_nano").build().get_submodule("layers.0.attention")
    shapes = {name: tuple(weight.shape) for name, weight in block.named_parameters()}
    assert shapes == {
        "wq.weight": (128, 128),
        "wk.weight": (64, 128),
        "wv.weight": (64, 128),
        "wo.weight": (128, 128),
    }


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_head(make_spec: MakeSpec, batch: Batch, *, tied: bool) -> None:
    spec = make_spec("llama_nano", tied_head=tied)
    model = spec.build()
    assert ("head.weight" in model.state_dict()) is not tied
    assert model(*batch.inputs).shape == (2, 16, 256)


def test_queries_share_keys_as_if_these_were_repeated() -> None:
    torch.manual_seed(0)
    grouped = GroupedQueryAttention(width=32, n_heads=4, n_kv_heads=2, dropout=0.0).double()
    whole = GroupedQueryAttention(width=32, n_heads=4, n_kv_heads=4, dropout=0.0).double()
    whole.wq, whole.wo = grouped.wq, grouped.wo
    for wide, narrow in ((whole.wk, grouped.wk), (whole.wv, grouped.wv)):
        repeated = narrow.weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
        wide.weight = nn.Parameter(repeated)
    x_BSD = torch.randn(2, 5, 32, dtype=torch.float64)
    rotary = rotary_table(positions=5, head_width=8, theta=10000.0)
    torch.testing.assert_close(grouped(x_BSD, rotary), whole(x_BSD, rotary))  # matmuls of other shapes


def test_rotation_keeps_lengths_and_sees_distances_only() -> None:
    rotary = rotary_table(positions=12, head_width=8, theta=10000.0).double()
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = [rotate(x.expand(1, 12, 1, 8), rotary)[0, :, 0] for x in (query, key)]
    scores = turned[0] @ turned[1].T
    torch.testing.assert_close(turned[0].norm(dim=-1), query.norm().expand(12))  # the table is float32
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[0][0], query)


def test_rotation_keeps_the_type_of_its_input() -> None:
    rotary = rotary_table(positions=3, head_width=8, theta=10000.0)
    assert rotate(torch.ones(1, 3, 1, 8, dtype=torch.bfloat16), rotary).dtype == torch.bfloat16
