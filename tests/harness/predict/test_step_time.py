"""Step times that can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.predict.hardware import Hardware
from harness.predict.step_time import timed_on
from harness.predict.trace import Trace
from strategies.step.step_recorder import Collective, OperatorWork

_HARDWARE: dict[str, Any] = {
    "name": "slow",
    "usable_gib": 1.0,
    "flops_per_s": {"fp32": 100.0, "bf16": 200.0},
    "bytes_per_s": 10.0,
    "launch_s": 1.0,
    "half_rows": 0,
    "ranks_per_node": 8,
    "link_bytes_per_s": 10.0,
    "latency_s": 2.0,
    "network_bytes_per_s": 5.0,
    "network_latency_s": 4.0,
    "host_bytes_per_s": 1.0,
}


def operator(
    flops: int = 0,
    nbytes: int = 0,
    count: int = 1,
    dtype: str = "float32",
    name: str = "aten.mm.default",
    written: int = 0,
    rows: int = 0,
) -> dict[OperatorWork, int]:
    work = OperatorWork(
        phase="forward",
        name=name,
        dtype=dtype,
        flops=flops,
        read_bytes=nbytes,
        written_bytes=written,
        outer_sizes=(rows, rows + 1) if rows else (),
    )
    return {work: count}


def collective(
    name: str = "all_gather",
    *,
    count: int = 1,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    is_waited: bool = False,
) -> dict[OperatorWork, int]:
    sent = Collective(name=name, payload_bytes=40, ranks=ranks, is_waited=is_waited)
    return {OperatorWork(phase="forward", name=name, collective=sent): count}


def copy(direction: str, nbytes: int, phase: str = "forward") -> dict[OperatorWork, int]:
    return {
        OperatorWork(phase=phase, name="aten.copy_.default", host_copy=direction, written_bytes=nbytes): 1
    }


COMPUTED = operator(flops=1000, count=2)  # 2 x (10 + 1) s
CASES = {
    "FLOPs and launches": ([COMPUTED], 22.0),
    "memory where that is slower": ([operator(flops=100, nbytes=200)], 21.0),
    "each dtype at its rate": ([operator(flops=1000, dtype="bfloat16")], 6.0),
    "a collective beside computation": ([COMPUTED, collective()], 22.0),
    "a collective that takes longer": ([COMPUTED, collective(count=5)], 25.0),
    "a collective that computation waits for": ([COMPUTED, collective(is_waited=True)], 27.0),
    "an all-reduce sends twice": ([collective("all_reduce")], 8.0),
    "the mesh leaves the node": ([collective(ranks=(0, 1, 2, 4))], 10.0),
    "copies both ways at once": ([copy("to_host", 30), copy("to_device", 20)], 30.0),
    "phases one after another": ([COMPUTED, copy("to_device", 30, "backward")], 52.0),
}


def trace(*calls: dict[OperatorWork, int]) -> Trace:
    operators = {work: count for call in calls for work, count in call.items()}
    return Trace(computes_in="float32", operators=operators, ranks_per_node=4)


@pytest.mark.parametrize(("calls", "seconds"), CASES.values(), ids=CASES)
def test_a_step_takes_the_sum_of_its_phases(calls: list[Any], seconds: float) -> None:
    times = timed_on(Hardware(device="cuda", **_HARDWARE))(trace(*calls))
    assert times.step_s == seconds
    assert times.peak_flops_per_s == 100.0


def test_ranks_beyond_those_of_a_node_are_on_another_one() -> None:
    asked = replace(trace(collective(ranks=(0, 1, 2, 8))), ranks_per_node=16)
    assert timed_on(Hardware(device="cuda", **_HARDWARE))(asked).step_s == 10.0


def test_on_a_cpu_nothing_overlaps() -> None:
    times = timed_on(Hardware(device="cpu", **_HARDWARE))(trace(COMPUTED, collective(), copy("to_host", 30)))
    assert times.step_s == 22.0 + 5.0 + 30.0


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 28.0), ("cuda", 22.0)])
def test_a_cpu_waits_for_policies(device: str, seconds: float) -> None:
    asked = replace(trace(COMPUTED), python_code={("forward", "asked"): 12})
    times = timed_on(Hardware(device=device, policy_s=0.5, **_HARDWARE))(asked)
    assert times.step_s == seconds


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        pytest.param(operator(flops=1000, rows=3), 21.0, id="a matrix product with few rows"),
        pytest.param(operator(flops=1000, rows=0), 11.0, id="one whose rows limit nothing"),
        pytest.param(
            operator(flops=1000, name="aten._scaled_dot_product_flash_attention.default"),
            21.0,
            id="attention",
        ),
        pytest.param(operator(name="aten.gelu.default", written=80), 41.0, id="a function of 20 elements"),
        pytest.param(operator(name="aten.add.Tensor", written=80), 9.0, id="arithmetic"),
    ],
)
def test_what_keeps_an_operator_from_the_peak(call: dict[OperatorWork, int], seconds: float) -> None:
    slow = _HARDWARE | {"half_rows": 3, "attention_share": 0.5, "functions_per_s": 0.5}
    assert timed_on(Hardware(device="cpu", **slow))(trace(call)).step_s == seconds


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="slow has no rate for float64, in which operators of this point"):
        timed_on(Hardware(device="cuda", **_HARDWARE))(trace(operator(flops=1, dtype="float64")))
