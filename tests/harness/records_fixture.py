"""Rank results and records as trials leave them: small, complete, and easy to change in one place."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from harness.records.predicted_step import PredictedStep
from harness.records.record import Ending, Identity, Record, build
from harness.records.store import trial_id

STARTED, FINISHED = "2026-01-02T03:04:05.000+00:00", "2026-01-02T03:04:15.000+00:00"
OK = Ending(status="ok", error=None, started_at=STARTED, finished_at=FINISHED)
PARTS = ("outputs", "loss", "gradients", "buffers", "rng_state", "parameters")

_MEMORY: dict[str, Any] = {
    "saved_bytes": 3_145_728,
    "peak_bytes": 10_485_760,
    "activation_peak_bytes": 4_194_304,
    "peak_phase": "backward",
    "peak_module": "layers.3",
    "parameter_bytes": 2_097_152,
    "gradient_bytes": 2_097_152,
    "optimizer_bytes": 4_194_320,
    "host_peak_bytes": 0,
    "allocator": {
        "source": "counting allocator",
        "peak_requested_bytes": 10_489_856,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "workspace_bytes": 4096,
        "backend_bytes": 0,
    },
    "peak_parts": {
        "parameters": 2_097_152,
        "gradients": 1_048_576,
        "optimizer": 4_194_320,
        "saved": 2_097_152,
        "temporary": 1_048_560,
    },
    "largest_saved": [
        {
            "bytes": 1_048_576,
            "op": "aten.mm.default",
            "module": "layers.0",
            "shape": [8, 128, 256],
            "dtype": "float32",
        },
        {
            "bytes": 524_288,
            "op": "aten.gelu.default",
            "module": "layers.1",
            "shape": [8, 128, 128],
            "dtype": "float32",
        },
    ],
    "timeline": [
        {"bytes": 9_437_184, "phase": "forward", "module": "layers.0"},
        {"bytes": 10_485_760, "phase": "backward", "module": "layers.3"},
    ],
    "saved_by_module": {"layers.0": 2_097_152, "layers.1": 1_048_576},
}
_WORK: dict[str, Any] = {
    "forward_flops": 1_000_000_000,
    "backward_flops": 3_000_000_000,
    "recomputed_flops": 1_000_000_000,
    "recomputed_ops": {"aten.mm.default": 16, "aten.gelu.default": 4},
    "calls": {"layers.0": 2, "layers.1": 2},
    "collectives": {
        "forward": {"all_gather": 8},
        "backward": {"all_gather": 8, "reduce_scatter": 9},
        "optimizer": {},
    },
    "collective_bytes": {
        "forward": {"all_gather": 8192},
        "backward": {"all_gather": 8192, "reduce_scatter": 9216},
        "optimizer": {},
    },
}


def rank_result(rank: int = 0) -> dict[str, Any]:
    """Return what `rank` of a trial under full AC reports; a fresh copy each time."""
    baseline_memory = _MEMORY | {"saved_bytes": 12_582_912, "peak_bytes": 20_971_520}
    baseline_work = _WORK | {"backward_flops": 2_000_000_000, "recomputed_flops": 0, "recomputed_ops": {}}
    equal = {"equal": True, "max_abs": 0.0, "max_rel": 0.0, "first_difference": None}
    return copy.deepcopy(
        {
            "rank": rank,
            "local_rank": rank,
            "memory": _MEMORY,
            "work": _WORK,
            "observation": {"named": [], "never_fired": [], "offloaded_bytes": 0, "chunks": 0},
            "baseline": {"memory": baseline_memory, "work": baseline_work},
            "parity": {
                "level": "bitwise",
                "steps": 3,
                **{part: dict(equal) for part in PARTS},
                "losses": [5.5, 5.25, 5.0],
            },
            "time": {
                "variant_s": [0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
                "twin_s": [0.4, 0.4, 0.4, 0.4, 0.4, 0.4],
                "devices": 1,
                "tokens_per_step": 1024,
                "peak_flops_per_s": 100_000_000_000.0,
                "peak_flops_per_s_source": "measured: fp32 matmul 1024x1024x1024, 1 threads",
                "energy_j": None,
            },
            "environment": {
                "torch": "2.13.0",
                "device": "cpu",
                "world_size": 1,
                "packages": {"numpy": "2.4.6"},
            },
        }
    )


def predicted_step(memory: dict[str, Any], **off_by: int) -> PredictedStep:
    """Return the prediction of a step that measures `memory` and the fixture's work; `off_by` is added."""
    known = {each.name for each in fields(PredictedStep)}
    numbers = {
        "host_peak_bytes": 0,
        **{key: value for key, value in (_WORK | memory).items() if key in known},
    }
    return PredictedStep(**numbers | {key: numbers[key] + value for key, value in off_by.items()})


def experiment(ac: str = "full", mesh: str = "single", /, **changes: Any) -> dict[str, Any]:
    """Return a resolved experiment; `changes` replace scalar fields, and options of a group when dicts."""
    resolved: dict[str, Any] = {
        "model": {"family": "gpt", "name": "gpt_nano", "layers_fqn": "layers", "dropout": 0.1},
        "mesh": {"name": mesh, "dp_shard": 2 if mesh == "shard2" else 1, "reshard_after_forward": True},
        "ac": {"name": ac, "layers_fqn": "layers"},
        "chunk": {"name": "none"},
        "shard": {"name": "none"},
        "data": {"name": "synthetic"},
        "protocol": {"name": "smoke", "parity_steps": 3},
        "dtype": "fp32",
        "seed": 0,
    }
    for key, value in changes.items():
        resolved[key] = resolved[key] | value if isinstance(value, dict) else value
    return resolved


def identity(resolved: dict[str, Any] | None = None, *, name: str = "demo") -> Identity:
    """Return the identity of a trial of the sweep `name`."""
    resolved = experiment() if resolved is None else resolved
    return Identity(
        trial_id=trial_id(resolved), environment_id="0123456789ab", name=name, experiment=resolved
    )


def record(resolved: dict[str, Any] | None = None, *results: dict[str, Any], name: str = "demo") -> Record:
    """Return the record of a trial that ended well; of one rank unless `results` are given."""
    return build(identity(resolved, name=name), OK, results or (rank_result(),))


def failed(status: str = "failed", resolved: dict[str, Any] | None = None, **error: Any) -> Record:
    """Return the record of a trial that did not end well."""
    described = {
        "kind": "ValueError",
        "message": "no\nmore",
        "rank": 1,
        "phase": "parity",
        "log": "rank1.log",
    }
    ending = Ending(status=status, error=described | error, started_at=STARTED, finished_at=FINISHED)
    return build(identity(resolved), ending)


def trial(ac: str, peak: int, step_s: float, /, mesh: str = "single", **changes: Any) -> Record:
    """Return a trial of a peak in bytes whose steps took as long as that, beside a twin of a second."""
    result = rank_result()
    result["memory"]["peak_bytes"] = peak
    result["time"] |= {"variant_s": [step_s] * 6, "twin_s": [1.0] * 6}
    for part, change in changes.items():
        result[part] |= change
    return record(experiment(ac, mesh), result)
