"""Peak arithmetic rates of devices: what MFU and HFU are fractions of."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from harness.measure.speed.timing import clock_for
from harness.records.fields import decode_file
from harness.records.files import write_once
from strategies.estimate.tensors import dtype_name

_MOST_BYTES = 2**16  # of a file that holds one rate
_TERA = 1e12
_MATMUL_SIZES = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRate:
    """The rate that stands for 100 %.

    Fields:
        flops_per_s: FLOP/s of dense matrix multiplication.
        source: where the number comes from; recorded next to every MFU.
    """

    flops_per_s: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Datasheet:
    """Dense TFLOP/s as NVIDIA publishes them; sparse figures are halved, None is not supported.

    Fields:
        half: bf16 and fp16 with fp32 accumulation; `bf16` false where only fp16 is.
        tf32: fp32 matmul on tensor cores.
        fp32: fp32 without them.
    """

    half: float
    tf32: float | None
    fp32: float
    source: str
    bf16: bool = True


_DATASHEETS: Mapping[str, _Datasheet] = {
    "B200": _Datasheet(half=2250, tf32=1125, fp32=75, source="NVIDIA HGX B200 datasheet, per GPU"),
    "H200 NVL": _Datasheet(half=835.5, tf32=417.5, fp32=60, source="NVIDIA H200 datasheet, NVL"),
    "GH200": _Datasheet(half=989.5, tf32=494.5, fp32=67, source="NVIDIA GH200 datasheet"),
    "H200": _Datasheet(half=989.5, tf32=494.5, fp32=67, source="NVIDIA H200 datasheet, SXM"),
    "H100 NVL": _Datasheet(half=835.5, tf32=417.5, fp32=60, source="NVIDIA H100 datasheet, NVL"),
    "H100 PCIe": _Datasheet(half=756.5, tf32=378, fp32=51, source="NVIDIA H100 datasheet, PCIe"),
    "H100": _Datasheet(half=989.5, tf32=494.5, fp32=67, source="NVIDIA H100 datasheet, SXM"),
    "A100": _Datasheet(half=312, tf32=156, fp32=19.5, source="NVIDIA A100 datasheet"),
    "A40": _Datasheet(half=149.7, tf32=74.8, fp32=37.4, source="NVIDIA A40 datasheet"),
    "A30": _Datasheet(half=165, tf32=82, fp32=10.3, source="NVIDIA A30 datasheet"),
    "A10": _Datasheet(half=125, tf32=62.5, fp32=31.2, source="NVIDIA A10 datasheet"),
    "L40S": _Datasheet(half=362.05, tf32=183, fp32=91.6, source="NVIDIA L40S datasheet"),
    "L4": _Datasheet(half=121, tf32=60, fp32=30.3, source="NVIDIA L4 datasheet"),
    "GeForce RTX 4090$": _Datasheet(
        half=165.2, tf32=82.6, fp32=82.6, source="NVIDIA Ada GPU architecture, v2.1"
    ),
    "GeForce RTX 3090$": _Datasheet(
        half=71, tf32=35.6, fp32=35.6, source="NVIDIA Ampere GA102 architecture, v2.1"
    ),
    "V100-SXM2": _Datasheet(half=125, tf32=None, fp32=15.7, source="NVIDIA V100 datasheet, SXM2", bf16=False),
    "V100-PCIE": _Datasheet(half=112, tf32=None, fp32=14, source="NVIDIA V100 datasheet, PCIe", bf16=False),
    "T4": _Datasheet(half=65, tf32=None, fp32=8.1, source="NVIDIA T4 datasheet", bf16=False),
}
"""Peak rates by a pattern of whole words in the device's name; the first that fits counts.

A10G is missing on purpose: published figures disagree by a factor of two. It is measured, as every other.
"""


def peak_flops(device: torch.device, dtype: torch.dtype, *, shared: Path) -> PeakRate:
    """Return the peak rate of matrix multiplication in `dtype` on `device`.

    Known GPUs have their datasheet's; fp32 counts as TF32 when torch's matmul precision allows that. For
    everything else the best of a few square matmuls with the current number of threads is taken, which costs
    well under a second.

    Args:
        dtype: dtype that the model computes in.
        shared: folder of a sweep: what one of its trials has measured on this kind of host counts for all, so
            that the load of the machine ranks none of them.
    """
    published = datasheet_rate(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return published or _measured_once(device, dtype, shared)


def _measured_once(device: torch.device, dtype: torch.dtype, shared: Path) -> PeakRate:
    """Return the rate that the first process on this machine measured, which all others read."""
    words = (platform.node(), device.type, dtype_name(dtype), str(torch.get_num_threads()))
    path = shared / f".peak_rate-{'-'.join(re.sub(r'[^A-Za-z0-9_.]', '_', word) for word in words)}.json"
    known = decode_file(PeakRate, path, _MOST_BYTES)
    if known is not None:
        return known
    measured = _measure(device, dtype)
    try:
        write_once(path, json.dumps(asdict(measured)))
    except OSError:  # a folder that nobody may write to, a file system without links
        return measured
    return decode_file(PeakRate, path, _MOST_BYTES) or measured


def datasheet_rate(device_name: str, dtype: torch.dtype) -> PeakRate | None:
    """Return the published rate, None for an unknown device or a dtype without a published rate."""
    sheet = _datasheet(device_name)
    if sheet is None:
        return None
    tera, label = _tera_flops(sheet, dtype)
    if tera is None:
        return None
    return PeakRate(flops_per_s=tera * _TERA, source=f"{sheet.source}, dense {label}")


def _datasheet(device_name: str) -> _Datasheet | None:
    if " MIG " in device_name:  # an instance carries the name of the whole GPU and has a part of its rate
        return None
    # whole words: L4 is not L40S, A10 is not A10G, B200 is not GB200
    fitting = (sheet for pattern, sheet in _DATASHEETS.items() if re.search(rf"\b{pattern}\b", device_name))
    return next(fitting, None)


def _tera_flops(sheet: _Datasheet, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the datasheet's rate for a dtype, and the name of the format that computes it."""
    if dtype == torch.float16 or (dtype == torch.bfloat16 and sheet.bf16):
        return sheet.half, dtype_name(dtype)
    if dtype != torch.float32:
        return None, ""
    if torch.get_float32_matmul_precision() != "highest" and sheet.tf32 is not None:
        return sheet.tf32, "tf32"
    return sheet.fp32, "fp32"


def _measure(device: torch.device, dtype: torch.dtype) -> PeakRate:
    size = _MATMUL_SIZES.get(device.type, _MATMUL_SIZES["cpu"])
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    clock = clock_for(device)
    best_s = min(clock(lambda: _multiply(left, right, product)) for _ in range(_REPEATS))
    shape = "x".join([str(size)] * 3)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return PeakRate(
        flops_per_s=2 * size**3 / best_s, source=f"measured: {dtype_name(dtype)} matmul {shape}{threads}"
    )


def _multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> None:
    with torch.no_grad():
        torch.mm(left, right, out=product)
