from __future__ import annotations

import yaml

from bench import calibrate
from harness.predict.hardware import Hardware


def test_what_is_measured_is_hardware() -> None:
    found = {
        "name": "this_cpu",
        "device": "cpu",
        "usable_gib": 10.0,
        "flops_per_s": {"fp32": 123_456_789_012.0},
        "bytes_per_s": calibrate._copied_bytes_per_s(),
        "launch_s": calibrate._launch_s(),
        "policy_s": calibrate._policy_s(),
        "half_rows": 6.0,
        "attention_share": 0.5,
        "functions_per_s": calibrate._functions_per_s(),
        "ranks_per_node": 2,
        "link_bytes_per_s": 1e9,
        "latency_s": 1e-4,
        "network_bytes_per_s": 1e9,
        "network_latency_s": 1e-4,
        "host_bytes_per_s": 1e9,
    }
    made = Hardware(**yaml.safe_load(calibrate.as_yaml(found)))
    assert made.rate("float32") == 123_000_000_000
    assert made.bytes_per_s > 0
    assert made.launch_s > 0
    assert made.policy_s >= 0
