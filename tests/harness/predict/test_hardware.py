"""Hardware as it ships, and what a number that cannot be is told."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.predict.hardware import Hardware
from harness.predict.this_cpu import THIS_CPU
from strategies.estimate.machine import A100
from tests.harness.composing import options_of
from tests.harness.predict.predicted import hardware

_NUMBERS = {field.name for field in fields(Hardware)} - {"name", "device", "ranks_per_node", "sources"}
_ASSUMED = {"efficiency", "attention_share", "functions_per_s", "policy_s"}
"""Numbers with a default, which a datasheet does not have."""


@pytest.mark.parametrize("name", [name for name in options_of("hardware") if name != THIS_CPU])
def test_every_number_has_its_source(name: str) -> None:
    found = hardware(name)
    assert found.name == name
    assert set(found.sources) >= _NUMBERS - _ASSUMED
    assert found.machine("float32").flops_per_s > 0


def test_plans_of_sharding_know_the_same_a100() -> None:
    machine = hardware("a100", efficiency=1).machine("bfloat16")
    assert (machine.flops_per_s, machine.link_bytes_per_s) == (A100.flops_per_s, A100.link_bytes_per_s)
    assert machine.latency_s == A100.latency_s


def test_rates_are_those_of_the_dtype_and_of_the_network_where_a_node_is_left() -> None:
    within, beyond = (hardware().machine("bfloat16", leaves_node=leaves) for leaves in (False, True))
    assert within.flops_per_s == pytest.approx(0.7 * 989.5e12)
    assert within.link_bytes_per_s == pytest.approx(0.7 * 450e9)
    assert beyond.link_bytes_per_s == pytest.approx(0.7 * 50e9)
    assert beyond.latency_s == 30e-6


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        hardware(flops_per_s={"fp32": 1e12}).rate("bfloat16")
    assert str(error.value) == (
        "hardware.flops_per_s.bf16: h100 has no rate for bfloat16, in which operators of this point compute; "
        "give one, or choose a dtype that has: fp32"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"usable_gib": 0.0}, "hardware.usable_gib: must be above 0 and finite, got 0.0", id="0"),
        pytest.param(
            {"flops_per_s": {"bf16": -1.0}},
            "hardware.flops_per_s.bf16: must be above 0 and finite, got -1.0",
            id="rate",
        ),
        pytest.param({"latency_s": -1.0}, "hardware.latency_s: must be at least 0, got -1.0", id="latency"),
        pytest.param({"ranks_per_node": 0}, "hardware.ranks_per_node: must be at least 1, got 0", id="ranks"),
        pytest.param({"efficiency": 1.5}, "hardware.efficiency: must be at most 1, got 1.5", id="share"),
        pytest.param({"device": "tpu"}, "hardware.device: must be one of cuda, cpu, got 'tpu'", id="device"),
    ],
)
def test_a_number_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    known = hardware()
    with pytest.raises(ConfigError) as error:
        replace(known, **changes)
    assert str(error.value) == message


def test_more_bytes_than_there_are_are_a_number() -> None:
    assert hardware(usable_gib=1e308).usable_bytes == sys.maxsize
