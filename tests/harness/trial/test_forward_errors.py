from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from harness.models.base import Batch
from harness.trial.forward_errors import explained

UNREDUCED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error ...\n"
    "Parameter indices which did not receive grad for rank 0: 1 2\n In addition, ..."
)


def test_inputs_of_another_dtype_than_the_parameters_are_named() -> None:
    model, batch = nn.Linear(2, 2, dtype=torch.bfloat16), Batch(inputs=(torch.ones(1, 2),), targets=None)
    with pytest.raises(RuntimeError) as raised:
        model(*batch.inputs)
    assert str(explained(raised.value, model, batch)) == (
        "dtype: inputs are float32, as the factory gives them, and parameters are bfloat16 "
        f"({raised.value}); "
        "use dtype=bf16_mixed, or let the factory give inputs in bfloat16"
    )
    alike = Batch(inputs=(torch.ones(1, 2, dtype=torch.bfloat16),), targets=None)
    assert explained(raised.value, model, alike) is None


def test_parameters_without_gradients_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    assert str(explained(RuntimeError(UNREDUCED), model, Batch(inputs=(), targets=None))) == (
        "mesh: DDP waits for the gradient of every parameter, and a step gives none to '1.weight', '1.bias'; "
        "use mesh=shard2, or freeze them in the factory"
    )


def test_gradients_of_torch_func_in_a_block_are_named() -> None:
    def forward() -> Tensor:
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            gradients: Tensor = torch.func.grad(lambda x: x.square().sum())(torch.ones(2))
        return gradients

    with pytest.raises(RuntimeError) as raised:
        forward()
    told = explained(raised.value, nn.Linear(1, 1), Batch(inputs=(), targets=None))
    assert str(told).startswith("ac: gradients of torch.func (test_forward_errors.py:")
    assert str(told).endswith("; take other blocks, or ac=budget, which leaves such ones as they are")


def test_other_words_are_left_alone() -> None:
    assert explained(RuntimeError("odd"), nn.Linear(1, 1), Batch(inputs=(), targets=None)) is None
