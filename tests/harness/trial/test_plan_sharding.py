"""What a trial's plan is made for; that steps keep it is in tests/parity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment
from harness.trial.plan_sharding import plan_sharding
from strategies.shard.model.shard_plan import ShardPlan
from strategies.tracing.shadow import Shadow, compute_in, shadowed
from tests.harness.composing import experiment_of

_SMALL = "model=llama_nano model.n_layers=1 batch_size=4 sequence_length=8 shard=megatron"
_ACTIVATION = 4 * 8 * 128
"""Elements of what a row-parallel linear gives on tp2."""


def _plan(line: str) -> ShardPlan:
    experiment: Experiment = experiment_of(f"{_SMALL} {line}")
    tokens = torch.zeros(experiment.batch_size // experiment.mesh.dp, 8, dtype=torch.int64, device="meta")
    plan = plan_sharding(experiment, (tokens,), torch.device("cpu"))
    assert plan is not None
    return plan


def test_without_a_variant_there_is_no_plan() -> None:
    experiment = experiment_of("mesh=tp2")
    assert plan_sharding(experiment, (), torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("line", "itemsizes"),
    [
        pytest.param("mesh=tp2", (4, 4), id="fp32"),
        pytest.param("mesh=tp2 dtype=bf16", (2, 2), id="bf16"),
        pytest.param("mesh=tp2 dtype=bf16_mixed", (2, 4), id="autocast: norms give, and get, fp32"),
        pytest.param("mesh=shard2_tp2 dtype=bf16_mixed", (2, 2), id="FSDP casts parameters and inputs"),
    ],
)
def test_bytes_are_of_the_dtype_that_is_computed_in(line: str, itemsizes: tuple[int, int]) -> None:
    plan = _plan(line)
    elements = _ACTIVATION // (2 if "shard2" in line else 1)
    assert {
        phase: {each.payload_bytes for each in plan.collectives if each.phase == phase}
        for phase in ("forward", "backward")
    } == {phase: {elements * size} for phase, size in zip(("forward", "backward"), itemsizes, strict=True)}


def test_fsdp_keeps_parameters_in_their_own_dtype_and_a_shard_of_each() -> None:
    whole, mixed = (_plan(f"mesh=shard2_tp2 dtype={dtype}") for dtype in ("fp32", "bf16_mixed"))
    alone = _plan("mesh=tp2 batch_size=2")
    with torch.device("meta"):
        model = experiment_of(_SMALL + " mesh=tp2").model.build()
    split = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if any(part in name for part in ("attention.w", "feed_forward."))
    )
    everything = sum(parameter.numel() for parameter in model.parameters())
    kept = everything - split // 2
    assert alone.memory_bytes - whole.memory_bytes == 2 * 4 * kept // 2
    # of the mixed one, activations alone are halved
    activations = whole.memory_bytes - 2 * 4 * kept // 2
    assert 0 < whole.memory_bytes - mixed.memory_bytes <= activations


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Bilinear(4, 4, 4)
        self.register_buffer("scale", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.unit(x, self.scale)
        return output


def test_units_of_fsdp_get_their_inputs_and_parameters_in_one_dtype() -> None:
    model = _Scaled().to("meta")
    compute_in(torch.bfloat16, model, [model.unit])
    shadow = Shadow.of(model).on(torch.device("cpu"))
    x = shadowed(shadow, torch.zeros(2, 4), torch.device("cpu"))
    assert shadow.model(x).dtype == torch.bfloat16
    assert model.scale.dtype == torch.float32
