"""What is measured is hardware; the numbers themselves are those of the machine."""

from __future__ import annotations

import pytest
import torch

from harness.predict import calibration
from harness.predict.hardware import Hardware
from harness.predict.this_cpu import THIS_CPU


def test_what_is_measured_is_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    monkeypatch.setattr(calibration, "_REPEATS", 1)
    monkeypatch.setattr(calibration, "_flops_per_s", lambda _dtype, rows=512: 1.23456e11 * rows / 512)
    monkeypatch.setattr(calibration, "_gloo", lambda: (1.23456e9, 1e-4))
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    found = calibration.measured()
    made = Hardware(**found)
    assert made.name == THIS_CPU
    assert made.rate("float32") == 123_000_000_000
    assert (made.link_bytes_per_s, made.latency_s) == (1.23e9, 1e-4)
    assert min(made.bytes_per_s, made.launch_s, made.functions_per_s or 0, made.host_bytes_per_s) > 0
    assert set(found["sources"]) == {*found} - {"name", "device", "sources", "ranks_per_node", "efficiency"}
