"""Operations of modules: dtypes and types of their operands, and which modules have none.

What each kind of module describes is examined in test_linear, test_weighted_products and test_norms.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strategies import StrategyError
from strategies.shard.operators.module_operations import linear_operation, module_operation


def test_a_linear_under_autocast_has_dtypes_of_its_own() -> None:
    half = {"input": torch.bfloat16, "output": torch.bfloat16}
    operation = module_operation(nn.Linear(16, 32, device="meta"), (4, 16)).typed(dtypes=half)
    operands = (*operation.inputs, *operation.outputs)
    assert {operand.name: operation.dtype_of(operand) for operand in operands} == {
        "input": torch.bfloat16,
        "weight": torch.float32,
        "bias": torch.float32,
        "output": torch.bfloat16,
    }


def test_statistics_of_double_precision_are_double() -> None:
    operation = module_operation(nn.BatchNorm1d(8), (4, 8)).typed(torch.float64)
    assert {operation.dtype_of(statistic) for statistic in operation.statistics} == {torch.float64}


def test_a_bias_may_be_a_parameter_where_the_weight_is_none() -> None:
    weight, bias = torch.empty(32, 16, device="meta"), nn.Parameter(torch.empty(32, device="meta"))
    operation = linear_operation((4, 16), weight, bias)
    assert [operand.type for operand in operation.inputs] == ["arg", "arg", "param"]


def test_refuses_a_module_that_is_not_described() -> None:
    with pytest.raises(StrategyError) as refusal:
        module_operation(nn.ReLU(), (4, 16))
    assert str(refusal.value) == (
        "module: must be a linear, conv2d, embedding, layer norm or batch norm, got ReLU"
    )
