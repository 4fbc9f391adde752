"""Measures this machine for predictions, and writes what it found to `conf/hardware/this_cpu.yaml`.

Matrix products of fp32 and bf16, a copy, operators too small to compute, and collectives of two ranks on gloo
with one thread each, as ranks of trials run. Each number is the best of several repeats: load of the machine
only makes it slower.

    python -m bench.calibrate
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.multiprocessing.spawn import spawn

_SIZE = 1024
_COPIED_BYTES = 1 << 28
_SENT_BYTES = 1 << 24
_REPEATS = 7
_LAUNCHES = 2000
_MEETINGS = 50
_FOLDER = Path(__file__).parents[1] / "conf" / "hardware"
_GIB = 1 << 30


def main() -> None:
    """Measure, print and write."""
    given = argparse.ArgumentParser(
        prog="python -m bench.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    given.add_argument("--out", type=Path, default=_FOLDER / "this_cpu.yaml", help="the YAML file")
    path: Path = given.parse_args().out
    text = as_yaml(measured())
    path.write_text(text, encoding="utf-8")
    print(text, end="")
    print(path)


def measured() -> dict[str, Any]:
    """Return the fields of the hardware that this machine is, for ranks of one thread."""
    torch.set_num_threads(1)
    rates = {name: _flops_per_s(dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    copied_bytes_per_s = _copied_bytes_per_s()
    link_bytes_per_s, latency_s = _gloo()
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = _processor()
    return {
        "name": "this_cpu",
        "device": "cpu",
        "usable_gib": round(memory * 0.9 / cores / _GIB, 1),
        "flops_per_s": rates,
        "bytes_per_s": copied_bytes_per_s,
        "launch_s": _launch_s(),
        "half_rows": 6.0,
        "ranks_per_node": cores,
        "link_bytes_per_s": link_bytes_per_s,
        "latency_s": latency_s,
        "network_bytes_per_s": link_bytes_per_s,
        "network_latency_s": latency_s,
        "host_bytes_per_s": copied_bytes_per_s,
        "efficiency": 1.0,
        "sources": {
            "usable_gib": f"9 tenths of {memory / _GIB:.1f} GiB, shared by a rank on each of {cores} cores",
            "flops_per_s": f"measured on {model}, matmul {_SIZE}x{_SIZE}x{_SIZE}, one thread",
            "bytes_per_s": f"measured, copy of {_COPIED_BYTES >> 20} MiB, one thread",
            "launch_s": f"measured, {_LAUNCHES} additions of one element",
            "half_rows": "assumed, as plans of chunks do",
            "link_bytes_per_s": f"measured, all-gather of {_SENT_BYTES >> 20} MiB by two ranks on gloo",
            "latency_s": "measured, all-gather of one element by two ranks on gloo",
            "network_bytes_per_s": "there is one node; as within it",
            "network_latency_s": "there is one node; as within it",
            "host_bytes_per_s": "host memory is the memory of the device; a copy",
        },
    }


def as_yaml(found: dict[str, Any]) -> str:
    """Return `found` as the file has it, numbers to three digits."""
    rounded = {
        key: {name: _rounded(each) for name, each in value.items()}
        if isinstance(value, dict)
        else _rounded(value)
        for key, value in found.items()
    }
    head = "# written by python -m bench.calibrate on the machine that measured\n"
    text: str = yaml.safe_dump(rounded, sort_keys=False, width=110)
    return head + text


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _best_s(work: Callable[[], object]) -> float:
    """Return the shortest time of several runs, after one that is not counted."""
    work()
    samples = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return min(samples)


def _flops_per_s(dtype: torch.dtype) -> float:
    left, right = torch.ones(_SIZE, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
    return 2 * _SIZE**3 / _best_s(lambda: left @ right)


def _copied_bytes_per_s() -> float:
    """Return the bytes read and written in a second."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _best_s(lambda: target.copy_(source))


def _launch_s() -> float:
    one = torch.ones(1)
    return _best_s(lambda: [one + one for _ in range(_LAUNCHES)]) / _LAUNCHES


def _gloo() -> tuple[float, float]:
    """Return the bandwidth and the latency of collectives."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder,), nprocs=2)
        sent_s, latency_s = (float(word) for word in Path(folder, "times").read_text("utf-8").split())
    return _SENT_BYTES / 2 / max(sent_s - latency_s, 1e-9), latency_s


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    times = [_gather_s(_SENT_BYTES // 2, 1), _gather_s(1, _MEETINGS)]
    if rank == 0:
        Path(folder, "times").write_text(" ".join(map(str, times)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _gather_s(nbytes: int, count: int) -> float:
    """Return the seconds of one all-gather of `nbytes` from each rank."""
    share = torch.ones(nbytes, dtype=torch.uint8)
    whole = [torch.empty_like(share) for _ in range(2)]

    def gather() -> None:
        for _ in range(count):
            dist.all_gather(whole, share)

    return _best_s(gather) / count


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")


if __name__ == "__main__":
    main()
