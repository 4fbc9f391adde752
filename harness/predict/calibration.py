"""The measurement of this machine for predictions; prints the fields of its hardware as JSON.

Matrix products of fp32 and bf16, whole and of few rows, attention, gelu, sums and copies, training of layers
too small to compute, and collectives of two ranks on gloo with one thread each, as ranks of trials run. As in
a step, operands are not in the cache, and results are kept. Each number is the best of several rounds, of CPU
time but for collectives: a busy machine spoils it little.

It runs in a process of its own (`harness.predict.this_cpu`), whose threads it sets to one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from harness.measure.environment import cpu_name
from harness.predict.this_cpu import THIS_CPU
from harness.records.files import write_atomically

_SIZE = 512
_COPIED_BYTES = 1 << 20
_HELD = 32
_FEW_ROWS = (4, 8, 16, 32)
_UNITS = 50
_OPERATORS_A_UNIT = 8
"""Of a linear, a normalisation and a relu: 3 in forward, 5 in backward; views are not counted."""

_ASKED = 400
_ROUNDS = 3
_LESS_IS_BETTER = ("launch_s", "policy_s")
_SENT_BYTES = 1 << 24
_REPEATS = 4
_MEETINGS = 50
_GIB = 1 << 30


def main() -> None:
    """Measure and print."""
    sys.stdout.write(json.dumps(measured()))


def measured() -> dict[str, Any]:
    """Return the fields of the hardware that this machine is, for ranks of one thread."""
    torch.set_num_threads(1)
    rates, other = _best_of_rounds()
    link_bytes_per_s, latency_s = _gloo()
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = cpu_name()
    found: dict[str, Any] = {
        "name": THIS_CPU,
        "device": "cpu",
        "usable_gib": round(memory * 0.9 / cores / _GIB, 1),
        "flops_per_s": rates,
        "bytes_per_s": other["bytes_per_s"],
        "launch_s": other["launch_s"],
        "policy_s": other["policy_s"],
        "half_rows": other["half_rows"],
        "attention_share": min(1.0, other["attention_flops_per_s"] / rates["fp32"]),
        "functions_per_s": other["functions_per_s"],
        "ranks_per_node": cores,
        "link_bytes_per_s": link_bytes_per_s,
        "latency_s": latency_s,
        "network_bytes_per_s": link_bytes_per_s,
        "network_latency_s": latency_s,
        "host_bytes_per_s": other["host_bytes_per_s"],
        "efficiency": 1.0,
        "sources": {
            "usable_gib": f"9 tenths of {memory / _GIB:.1f} GiB, shared by a rank on each of {cores} cores",
            "flops_per_s": f"measured on {model}, matmuls {_SIZE}x{_SIZE}x{_SIZE}, one thread",
            "bytes_per_s": f"measured, {_HELD} sums of tensors of {_COPIED_BYTES >> 20} MiB, one thread",
            "launch_s": f"measured, training of {_UNITS} tiny layers, by operator",
            "policy_s": "measured, torch's selective checkpoint around tiny operators, by operator",
            "half_rows": f"measured, matmul of {_FEW_ROWS[0]} to {_FEW_ROWS[-1]} rows",
            "attention_share": "measured, attention of 32 heads, 128 tokens, width 64, with backward",
            "functions_per_s": "measured, gelu of a tensor in the cache",
            "link_bytes_per_s": f"measured, all-gather of {_SENT_BYTES >> 20} MiB by two ranks on gloo",
            "latency_s": "measured, all-gather of one element by two ranks on gloo",
            "network_bytes_per_s": "there is one node; as within it",
            "network_latency_s": "there is one node; as within it",
            "host_bytes_per_s": "host memory is the memory of the device; copies into new pages",
        },
    }
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: Any) -> Any:
    """Return numbers to three digits: more of them are noise."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _best_of_rounds() -> tuple[dict[str, float], dict[str, float]]:
    """Return the rates of matrix products by dtype, and the other numbers, each at its best.

    All are measured in each of several rounds: what else runs spoils some of them.
    """
    rounds = [_round() for _ in range(_ROUNDS)]
    best = {
        name: (min if name in _LESS_IS_BETTER else max)(each[name] for each in rounds) for name in rounds[0]
    }
    rates = {name: best.pop(name) for name in ("fp32", "bf16")}
    few = {rows: best.pop(f"rows{rows}") for rows in _FEW_ROWS}
    best["half_rows"] = median(max(0.0, rows * (rates["fp32"] / rate - 1)) for rows, rate in few.items())
    return rates, best


def _round() -> dict[str, float]:
    given = torch.ones(1 << 18)
    return {
        "fp32": _flops_per_s(torch.float32),
        "bf16": _flops_per_s(torch.bfloat16),
        "bytes_per_s": _moved_bytes_per_s(),
        "host_bytes_per_s": _copied_bytes_per_s(),
        "launch_s": _launch_s(),
        "policy_s": _policy_s(),
        "attention_flops_per_s": _attention_flops_per_s(),
        "functions_per_s": given.numel() / _best_s(lambda: functional.gelu(given)),
        **{f"rows{rows}": _flops_per_s(torch.float32, rows) for rows in _FEW_ROWS},
    }


def _best_s(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Return the shortest time of several runs, after one that is not counted."""
    work()
    samples = []
    for _ in range(_REPEATS):
        started = clock()
        work()
        samples.append(clock() - started)
    return min(samples)


def _flops_per_s(dtype: torch.dtype, rows: int = _SIZE) -> float:
    """Return the FLOPs a second of matrix products, each of operands that the cache has not."""
    left = [torch.ones(rows, _SIZE, dtype=dtype) for _ in range(_HELD)]
    right = [torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(_HELD)]
    pairs = list(zip(left, right, strict=True))
    return _HELD * 2 * rows * _SIZE**2 / _best_s(lambda: [one @ other for one, other in pairs])


def _attention_flops_per_s() -> float:
    """Return the FLOPs a second of attention and its backward: 2 products, and 5 with the scores."""
    query, key, value = (torch.ones(8, 4, 128, 64, requires_grad=True) for _ in range(3))
    flops = 2 * 8 * 4 * 128 * 128 * 64

    def both() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).backward(value)

    return 7 * flops / _best_s(both)


def _moved_bytes_per_s() -> float:
    """Return the bytes read and written in a second by an operator whose result is kept."""
    given = [torch.ones(_COPIED_BYTES // 4) for _ in range(_HELD)]
    pairs = list(zip(given, [*given[1:], given[0]], strict=True))
    return 3 * _HELD * _COPIED_BYTES / _best_s(lambda: [one + other for one, other in pairs])


def _copied_bytes_per_s() -> float:
    """Return the bytes a second of copies that are kept, as those of activations on the host are."""
    given = [torch.ones(_COPIED_BYTES // 4) for _ in range(_HELD)]
    return _HELD * _COPIED_BYTES / _best_s(lambda: [one.clone() for one in given])


def _launch_s() -> float:
    """Return the seconds that an operator of a training step takes at least: calls of modules, autograd."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(_UNITS)]
    model, given = nn.Sequential(*layers), torch.ones(2, 8)

    def step() -> None:
        model.zero_grad()
        model(given).sum().backward()

    return _best_s(step) / (_UNITS * _OPERATORS_A_UNIT)


def _policy_s() -> float:
    """Return the seconds that torch's selective checkpoint takes to ask about an operator, saved or not."""
    given = torch.ones(8)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.neg.default])

    def run(enclosed: AbstractContextManager[Any]) -> None:
        with enclosed:
            for _ in range(_ASKED // 2):
                given.neg().abs()

    return max(0.0, _best_s(lambda: run(contexts()[0])) - _best_s(lambda: run(nullcontext()))) / _ASKED


def _gloo() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder,), nprocs=2)
        sent_s, latency_s = (float(word) for word in Path(folder, "times").read_text("utf-8").split())
    return _SENT_BYTES / 2 / max(sent_s - latency_s, 1e-9), latency_s


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    times = [_gather_s(_SENT_BYTES // 2, 1), _gather_s(1, _MEETINGS)]
    if rank == 0:
        write_atomically(Path(folder, "times"), " ".join(map(str, times)))
    dist.barrier()
    dist.destroy_process_group()


def _gather_s(nbytes: int, count: int) -> float:
    """Return the seconds of one all-gather of `nbytes` from each rank."""
    share = torch.ones(nbytes, dtype=torch.uint8)
    whole = [torch.empty_like(share) for _ in range(2)]

    def gather() -> None:
        for _ in range(count):
            dist.all_gather(whole, share)

    return _best_s(gather, time.perf_counter) / count


if __name__ == "__main__":
    main()
