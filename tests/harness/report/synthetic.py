"""A sweep that has everything a report must show: every status, every verdict, every part, hostile names."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness.records.record import STATUSES, Ending, Record, build, refused
from tests.harness.records_fixture import (
    FINISHED,
    OK,
    PARTS,
    STARTED,
    experiment,
    identity,
    predicted_step,
    rank_result,
)

_MESHES = {
    "single": (1, 1, 1),
    "ddp2": (2, 1, 1),
    "shard2": (1, 2, 1),
    "hsdp2x2": (2, 2, 1),
    "tp2": (1, 1, 2),
}
_VARIANTS = ("none", "full", "selective_op", "offload", "nested", "budget")
_MODELS = ("gpt_nano", "llama_1b")
HOSTILE = "</script><b>|`*_\\ ünïcode"
_ENVIRONMENT = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "cuda": "13.0",
    "backend": "nccl",
    "device": "NVIDIA H200",
    "cpus": 16,
    "driver": "580.1",
    "host": "node <1>",
    "world_size": 2,
    "commit": "1" * 40,
    "packages": {"numpy": "2.4.6"},
    "foreign_processes": [],
}


def sweep(count: int) -> list[Record]:
    """Return `count` records, the same ones each time; of 20 and more, every status and verdict."""
    generator = random.Random(7)
    points = itertools.islice(_points(), count)
    return [_record(number, resolved, generator) for number, resolved in enumerate(points)]


def _points() -> Iterator[dict[str, Any]]:
    for seed in itertools.count():
        for model, mesh, variant in itertools.product(_MODELS, _MESHES, _VARIANTS):
            replicate, shard, tp = _MESHES[mesh]
            sizes = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
            ac = {"fraction": seed / 1000} if variant == "budget" else {}
            yield experiment(
                variant, mesh, seed=seed, model={"name": model}, mesh=sizes, ac=ac, chunk=_chunk(seed)
            )


def _chunk(seed: int) -> dict[str, Any]:
    return {"name": "budget", "budget_mib": 8.0 + seed} if seed % 2 else {}


def _record(number: int, resolved: dict[str, Any], generator: random.Random) -> Record:
    who = replace(identity(resolved, name="synthetic"), environment_id="0123456789ab")
    status = STATUSES[number % 23] if number % 23 < len(STATUSES) else "ok"
    if status == "refused":
        return refused(who, f"mesh: {HOSTILE}", at=STARTED, environment=_ENVIRONMENT)
    if status not in {"ok", "predicted"}:
        error = {
            "kind": "RuntimeError",
            "message": f"{HOSTILE}\nmore",
            "rank": 1,
            "phase": "parity",
            "log": "rank1.log",
        }
        ending = Ending(status=status, error=error, started_at=STARTED, finished_at=FINISHED)
        return build(who, ending, environment=_ENVIRONMENT)
    ranks = [_rank(rank, number, resolved, generator) for rank in range(2)]
    off_by = generator.randrange(10**9) if number % 8 == 0 else 0
    predicted = predicted_step(ranks[0]["memory"], saved_bytes=off_by) if number % 4 == 0 else None
    ending = replace(OK, status=status)
    return build(who, ending, ranks, environment=_ENVIRONMENT, predicted=predicted)


def _rank(rank: int, number: int, resolved: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    result = rank_result(rank)
    is_plain = resolved["ac"]["name"] == "none"
    saved = generator.randrange(10**6, 10**10)
    result["memory"] |= {
        "saved_bytes": saved,
        "peak_bytes": saved + generator.randrange(10**9, 10**10),
        "activation_peak_bytes": saved + generator.randrange(0, 10**8),
        "parameter_bytes": generator.randrange(10**8, 10**9),
        "peak_module": HOSTILE,
        "timeline": [
            {"bytes": generator.randrange(10**9, 10**10), "phase": phase, "module": HOSTILE}
            for phase in ("forward", "backward", "optimizer")
        ],
    }
    result["work"]["recomputed_flops"] = 0 if is_plain else generator.randrange(10**9, 10**15)
    result["environment"] = _ENVIRONMENT | {"world_size": 2}
    _set_time(result["time"], generator)
    result["baseline"]["memory"]["peak_bytes"] = 2 * 10**10
    match number % 17:
        case 7:
            _differ(result["parity"], rank)
        case 8:
            result["observation"] |= {"named": [HOSTILE], "never_fired": [HOSTILE]}
        case 9:
            result["parity"] = result["baseline"] = None
        case 10:
            result["observation"]["plan"] = {
                "regions": [{"path": [0, 1], "saved": HOSTILE, "bytes": 123_456_789}]
            }
        case 11:
            result["time"] = None
        case 12:
            result["parity"]["level"] = "tolerance"
    return result


def _set_time(time: dict[str, Any], generator: random.Random) -> None:
    twin = [generator.uniform(0.01, 2.0) for _ in range(8)]
    factor = generator.uniform(0.9, 1.6)
    time |= {
        "twin_s": twin,
        "variant_s": [each * factor * generator.uniform(0.99, 1.01) for each in twin],
        "peak_flops_per_s_source": "NVIDIA H200 datasheet",
        "energy_j": generator.uniform(1, 1000),
    }


def _differ(parity: dict[str, Any], rank: int) -> None:
    difference = {
        "name": f"layers.0.{HOSTILE}",
        "index": [3, 17],
        "rank": rank,
        "step": 0,
        "expected": 0.125,
        "actual": float("nan"),
    }
    for part in PARTS[2:4]:
        parity[part] = {
            "equal": False,
            "max_abs": float("inf"),
            "max_rel": float("nan"),
            "first_difference": difference,
        }
