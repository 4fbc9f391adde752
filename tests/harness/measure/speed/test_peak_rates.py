from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.measure.speed.peak_rates import PeakRate, datasheet_rate, peak_flops
from tests.gpu.devices import CUDA

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("name", "dtype", "tera_flops"),
    [
        ("NVIDIA B200", BF16, 2250),
        ("NVIDIA H200", BF16, 989.5),
        ("NVIDIA H200 NVL", BF16, 835.5),
        ("NVIDIA GH200 480GB", BF16, 989.5),
        ("NVIDIA H100 80GB HBM3", BF16, 989.5),
        ("NVIDIA H100 80GB HBM3", FP32, 67),
        ("NVIDIA H100 PCIe", BF16, 756.5),
        ("NVIDIA H100 NVL", BF16, 835.5),
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA A100-SXM4-80GB", FP32, 19.5),
        ("NVIDIA A100 80GB PCIe", FP16, 312),
        ("NVIDIA A10", BF16, 125),
        ("NVIDIA A40", BF16, 149.7),
        ("NVIDIA L40S", BF16, 362.05),
        ("NVIDIA L4", BF16, 121),
        ("NVIDIA GeForce RTX 4090", BF16, 165.2),
        ("Tesla V100-SXM2-16GB", FP16, 125),
        ("Tesla V100-PCIE-32GB", FP16, 112),
        ("Tesla T4", FP16, 65),
    ],
)
def test_known_gpus_have_the_dense_rate_of_their_datasheet(
    name: str, dtype: torch.dtype, tera_flops: float
) -> None:
    rate = datasheet_rate(name, dtype)
    assert rate is not None
    assert rate.flops_per_s == pytest.approx(tera_flops * 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("NVIDIA A10G", BF16, id="no longer name of a known one"),
        pytest.param("NVIDIA GB200", BF16, id="no known name inside another"),
        pytest.param("NVIDIA GeForce RTX 4090 Laptop GPU", BF16, id="no laptop"),
        pytest.param("NVIDIA A100-SXM4-40GB MIG 1g.5gb", BF16, id="no part of a GPU"),
        pytest.param("Tesla V100-SXM2-16GB", BF16, id="no dtype that it lacks"),
        pytest.param("NVIDIA H200", FP64, id="no dtype that is not in the table"),
    ],
)
def test_nothing_is_guessed(name: str, dtype: torch.dtype) -> None:
    assert datasheet_rate(name, dtype) is None


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", PeakRate(flops_per_s=156e12, source="NVIDIA A100 datasheet, dense tf32")),
        (
            "Tesla V100-SXM2-16GB",
            PeakRate(flops_per_s=15.7e12, source="NVIDIA V100 datasheet, SXM2, dense fp32"),
        ),
    ],
)
def test_fp32_is_tf32_where_that_is_allowed_and_exists(name: str, expected: PeakRate) -> None:
    assert datasheet_rate(name, FP32) == expected


def test_a_cpu_is_measured_and_says_so(tmp_path: Path) -> None:
    rate = peak_flops(torch.device("cpu"), FP32, shared=tmp_path)
    assert peak_flops(torch.device("cpu"), FP32, shared=tmp_path) == rate  # one a sweep
    assert peak_flops(torch.device("cpu"), FP32, shared=tmp_path / "missing").source == rate.source
    assert len(list(tmp_path.iterdir())) == 1
    assert rate.flops_per_s > 1e8
    assert re.fullmatch(r"measured: float32 matmul 1024x1024x1024, \d+ threads", rate.source)


@pytest.mark.parametrize("device", [CUDA])
def test_a_gpu_has_a_rate(device: str) -> None:
    least = 1e12 if device == "cuda" else 1e7
    assert peak_flops(torch.device(device, 0), BF16, shared=Path()).flops_per_s > least
