"""Whole trials: each small point runs once, when the first test reads its record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.ranks.agent import Agent
from harness.records.parity_result import PARTS
from harness.records.record import Record
from harness.report.wandb.publisher import Tracker
from harness.sweep.launch import Run, run_sweep
from strategies.regions.presets import PRESETS
from tests.harness.composing import experiment_of, point_of

Trial = Callable[[str], Record]

SHORT = "protocol=smoke protocol.timed_pairs=0 protocol.parity_steps=1 protocol.deadline_s=600"
SMALL = f"data=synthetic batch_size=2 sequence_length=32 {SHORT}"
NANO = f"{SMALL} model.width=32 model.hidden_width=64"
USER = "model=python model.factory=tests.harness.user_models"
DROPOUT = "ac=full model.dropout=0.1 protocol.parity_steps=3"
WRONG_DROPOUT = "ac=full model.dropout=0.1 ac.preserve_rng_state=false"
TO_THE_END = "ac=nested ac.levels=[1,2,2] ac.early_stop=false"
KEPT = "ac=nested ac.levels=[2,2] ac.offload={inputs:[0],all:[[1,0]]} ac.keep=[[1,0]]"
OWN_CHECKPOINT = f"{USER}:checkpoints_its_head ac=full"
FLAGGED = f"{USER}:sets_a_flag ac=full protocol.probes=true"
BRING_INPUTS = (":regression", ":returns_an_iterator")
"""Factories that take no batch size."""

_VARIANTS = ["ac=none", "ac=full", "ac=selective_layer", "ac=selective_op", "ac=offload"]
_L, _B, _S, _D, _F = 4, 2, 32, 32, 64
INPUT_BYTES = 4 * _B * _S * _D
"""Of one block."""
RNG_BYTES = torch.get_rng_state().nbytes
"""What preserving the RNG state keeps for one region."""
BLOCKS_FLOPS = _L * _B * _S * (8 * _D * _D + 4 * _D * _F + 4 * _S * _D)
HEAD_FLOPS = 2 * _B * _S * _D * 256
LAST_LINEAR_FLOPS = 2 * _B * _S * _D * _F
"""Of one block; nothing needs its output, so early stop leaves it out."""
ATTENTION_FLOPS = 4 * _B * _S * _S * _D


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def trial(root: Path, standing_agent: Agent) -> Trial:
    run = Run(outputs_dir=str(root), name="trials")

    @cache
    def record(line: str) -> Record:
        point = point_of(f"{_options(line)} {line}")
        (found,) = run_sweep([point], run, Tracker(name="none"), agent=standing_agent).records
        return found

    return record


def _options(line: str) -> str:
    if any(name in line for name in BRING_INPUTS):
        return SHORT
    return SMALL if USER in line else NANO


RECORD_KEYS = {
    "": {
        "schema_version", "trial_id", "environment_id", "name", "started_at", "finished_at", "experiment",
        "status", "error", "verdict", "reason", "parity", "memory", "work", "time", "plan", "environment",
        "note", "trained", "probes", "predicted", "outlook", "assumes", "bound", "unbounded",
    },
    "trained": {"elements", "computes_in", "changed", "inputs", "remarks", "replaced"},
    "parity": {
        "level", "steps", "first", "losses", "weightless", "control", "compared", "chain", "first_module",
        "unreached", "absent", "uncompared", *PARTS,
    },
    "parity.weightless": {"not_finite_from", "not_finite", "zero_from", "zero_blocks_from"},
    "parity.compared": {"variant", "baseline", "dtype", "optimizer", "relative", "parameters", "floor"},
    "parity.gradients": {"equal", "max_abs", "max_rel", "first_difference"},
    "memory": {
        "saved_bytes", "peak_bytes", "activation_peak_bytes", "peak_phase", "peak_module", "parameter_bytes",
        "gradient_bytes", "optimizer_bytes", "host_peak_bytes", "random_state_bytes", "by_rank", "allocator",
        "largest_saved", "largest_at_peak", "saved_by_module", "peak_parts", "timeline", "baseline",
        "pipeline", "predicted_peak_bytes",
    },
    "memory.allocator": {
        "source", "peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "workspace_bytes",
        "backend_bytes",
    },
    "memory.baseline": {"saved_bytes", "peak_bytes", "random_state_bytes"},
    "work": {
        "forward_flops", "backward_flops", "recomputed_flops", "recomputed_ops", "named", "never_fired",
        "acted_otherwise", "compiled_graphs", "graph_breaks", "recomputations", "policy_answers",
        "kernel_recomputed_flops", "causal_attention_flops", "uncounted_ops", "recomputed_seconds_share",
        "offloaded_bytes", "chunks", "calls", "collectives", "collective_bytes", "collectives_repeated",
        "routing", "baseline",
    },
    "work.collectives": {"forward", "backward", "optimizer"},
    "work.collective_bytes": {"forward", "backward", "optimizer"},
    "work.baseline": {
        "forward_flops", "backward_flops", "recomputed_flops", "kernel_recomputed_flops",
    },
    "time": {
        "step_time_s", "ratio_to_baseline", "tokens_per_s", "mfu", "hfu", "peak_flops_per_s_source",
        "peak_flops_per_s", "energy_j", "job_tokens_per_s", "samples_s",
    },
    "time.step_time_s": {"median", "p10", "p90", "count"},
    "time.ratio_to_baseline": {"median", "low", "high"},
}  # fmt: skip


@pytest.mark.parametrize("path", RECORD_KEYS, ids=lambda path: path or "record")
def test_a_record_has_the_agreed_keys(trial: Trial, path: str) -> None:
    value = trial(f"{USER}:reads_values ac=full protocol.timed_pairs=2").to_dict()
    for key in path.split(".") if path else ():
        value = value[key]
    assert set(value) == RECORD_KEYS[path]


def test_a_record_says_what_ran_and_where(trial: Trial) -> None:
    record = trial("ac=full mesh=shard2")
    assert record.experiment == experiment_of(f"{NANO} ac=full mesh=shard2").to_dict()
    assert (record.status, record.error, record.note, record.name) == ("ok", None, None, "trials")
    assert record.started_at < record.finished_at
    assert record.environment["world_size"] == 2
    assert record.environment["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("ac=none", "neutral"),
        ("ac=full", "neutral"),
        ("ac=full ac.early_stop=false", "neutral"),
        ("ac=selective_layer", "neutral"),
        ("ac=selective_op", "neutral"),
        pytest.param(
            "ac=selective_op ac.save_ops=modalities model=llama_nano", "neutral", marks=pytest.mark.matrix
        ),
        ("ac=offload", "neutral"),
        (DROPOUT, "neutral"),
        ("ac=full mesh=shard2", "neutral"),
        (f"{USER}:regression ac=full", "inert"),  # its blocks keep what a region would: it frees nothing
        (f"{USER}:regression model.layers_fqn=''", "neutral"),
        (f"{USER}:reads_values ac=full protocol.timed_pairs=2", "neutral"),
        (f"{USER}:draws_weights_elsewhere ac=full", "neutral"),
        ("ac=selective_layer ac.ac_freq=99", "inert"),
        ("ac=selective_op ac.save_ops=modalities", "inert"),
        (WRONG_DROPOUT, "differs"),
        (f"{USER}:never_the_same ac=full", "unverified"),
        pytest.param(f"{USER}:never_the_same ac=full mesh=shard2", "unverified", marks=pytest.mark.matrix),
    ],
)
def test_verdict(trial: Trial, line: str, verdict: str) -> None:
    assert (trial(line).status, trial(line).verdict) == ("ok", verdict)


@pytest.mark.parametrize(
    ("line", "recomputed"),
    [
        ("ac=none", 0),
        ("ac=offload", 0),
        ("ac=selective_layer ac.ac_freq=99", 0),
        ("ac=full ac.early_stop=false", BLOCKS_FLOPS),
        ("ac=full", BLOCKS_FLOPS - _L * LAST_LINEAR_FLOPS),
        ("ac=selective_layer", (BLOCKS_FLOPS - _L * LAST_LINEAR_FLOPS) // 2),
        ("ac=selective_op", 0),
        (
            "ac=selective_op ac.save_ops=[attention,topk]",
            BLOCKS_FLOPS - _L * (LAST_LINEAR_FLOPS + ATTENTION_FLOPS),
        ),
    ],
)
def test_flops_are_exact(trial: Trial, line: str, recomputed: int) -> None:
    work = trial(line).work
    assert work is not None
    assert work.forward_flops == BLOCKS_FLOPS + HEAD_FLOPS
    assert work.recomputed_flops == recomputed
    assert work.baseline is not None
    assert work.baseline.forward_flops == work.forward_flops
    assert work.backward_flops == work.baseline.backward_flops + recomputed


def test_flops_agree_with_what_the_model_knows(trial: Trial) -> None:
    work = trial("ac=none").work
    assert work is not None
    assert work.forward_flops == experiment_of(NANO).model.flops_per_sample(_S) * _B  # type: ignore[operator]


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        ("ac=none", [1, 1, 1, 1]),
        ("ac=offload", [1, 1, 1, 1]),
        ("ac=full", [2, 2, 2, 2]),
        ("ac=selective_op", [2, 2, 2, 2]),
        ("ac=selective_layer", [1, 2, 1, 2]),
        ("ac=selective_layer ac.ac_freq=99", [1, 1, 1, 1]),
        # one more than the regions around a block; what stops early does so before the last block
        (TO_THE_END, [4, 4, 4, 4]),
        ("ac=nested", [3, 2, 3, 2]),
        pytest.param("ac=nested mesh=shard2", [3, 2, 3, 2], marks=pytest.mark.matrix),
    ],
)
def test_forward_calls_of_every_block(trial: Trial, line: str, calls: list[int]) -> None:
    work = trial(line).work
    assert work is not None
    assert work.calls == {f"layers.{index}": count for index, count in enumerate(calls)}


def test_the_plan_says_what_was_decided_and_moved(trial: Trial) -> None:
    assert trial("ac=full").plan is None
    record = trial(KEPT)
    assert record.plan is not None
    assert record.work is not None
    first, second = record.plan["regions"]
    kept, last = second["regions"]
    assert [region["region"] for region in (first, second, kept, last)] == ["0", "1", "1_0", "1_1"]
    assert (second["first"], second["last"], second["calls"]) == ("layers.2", "layers.3", 2)
    assert [region["recomputed"] for region in (first, second, kept, last)] == [True, True, False, True]
    assert [region["offload"] for region in (first, second, kept, last)] == ["inputs", None, "all", None]
    assert (first["moved_bytes"], first["fetched_bytes"]) == (INPUT_BYTES, INPUT_BYTES)
    assert kept["moved_bytes"] == record.work.offloaded_bytes - INPUT_BYTES > INPUT_BYTES


def test_saved_bytes_are_what_the_variants_claim(trial: Trial) -> None:
    lines = [
        *_VARIANTS,
        "ac=full ac.early_stop=false",
        "ac=selective_layer ac.ac_freq=99",
        DROPOUT,
        WRONG_DROPOUT,
    ]
    saved = {line: memory.saved_bytes for line in lines if (memory := trial(line).memory) is not None}
    offload = trial("ac=offload").work
    assert offload is not None
    outside = saved["ac=offload"]
    blocks = offload.offloaded_bytes
    assert saved["ac=none"] == outside + blocks
    assert saved["ac=full"] == outside + _L * (INPUT_BYTES + RNG_BYTES)
    assert saved["ac=full ac.early_stop=false"] == saved["ac=full"]
    assert saved["ac=selective_layer"] == outside + blocks // 2 + 2 * (INPUT_BYTES + RNG_BYTES)
    assert saved["ac=selective_layer ac.ac_freq=99"] == saved["ac=none"]
    assert saved["ac=full"] < saved["ac=selective_op"] < saved["ac=none"]
    assert saved[DROPOUT] - saved[WRONG_DROPOUT] == _L * RNG_BYTES


def test_the_baseline_of_a_trial_is_the_trial_without_the_variant(trial: Trial) -> None:
    none = trial("ac=none").memory
    assert none is not None
    for line in ("ac=none", "ac=full", "ac=offload"):
        memory = trial(line).memory
        assert memory is not None
        assert memory.baseline is not None
        assert memory.baseline.saved_bytes == none.saved_bytes
        assert memory.baseline.peak_bytes == none.peak_bytes


def test_a_save_list_that_never_fires_is_full_ac_and_says_so(trial: Trial) -> None:
    record, full = trial("ac=selective_op ac.save_ops=modalities"), trial("ac=full")
    assert record.work is not None
    assert full.work is not None
    assert record.work.never_fired == record.work.named == PRESETS["modalities"].operators
    assert record.work.recomputed_ops == full.work.recomputed_ops
    assert record.work.recomputed_ops["aten.addmm.default"] == 5 * _L


def test_an_entry_that_never_fires_is_named_beside_one_that_does(trial: Trial) -> None:
    record = trial("ac=selective_op ac.save_ops=[attention,topk]")
    assert record.work is not None
    assert (record.work.named, record.work.never_fired) == (("attention", "topk"), ("topk",))
    assert not any("attention" in operator for operator in record.work.recomputed_ops)
    assert record.verdict == "neutral"


@pytest.mark.matrix
def test_the_operators_of_a_preset_that_never_fire_are_named(trial: Trial) -> None:
    record = trial("ac=selective_op ac.save_ops=modalities model=llama_nano")
    assert record.work is not None
    assert record.work.named == PRESETS["modalities"].operators
    assert record.work.never_fired == PRESETS["modalities"].operators[1:]  # mm fires


def test_other_random_numbers_in_recomputation_are_found_in_the_gradients(trial: Trial) -> None:
    parity = trial(WRONG_DROPOUT).parity
    assert parity is not None
    difference = parity.gradients.first_difference
    assert difference is not None
    assert (difference.step, difference.rank) == (0, 0)
    assert difference.expected != difference.actual
    assert difference.name in dict(experiment_of("").model.build().named_parameters())


@pytest.mark.parametrize("mesh", ["", pytest.param(" mesh=shard2", marks=pytest.mark.matrix)])
def test_a_model_that_does_not_repeat_itself_is_not_blamed_on_the_variant(trial: Trial, mesh: str) -> None:
    record = trial(f"{USER}:never_the_same ac=full{mesh}")
    assert record.reason is not None
    assert record.reason.startswith(
        "the plain model does not repeat itself: output 'outputs' differs first at (0, 0, 0) on rank 0 "
    )


def test_the_first_difference_of_a_variant_is_a_gradient_of_the_last_block(trial: Trial) -> None:
    record = trial(WRONG_DROPOUT)
    assert record.parity is not None
    assert record.parity.first is not None
    assert (record.parity.first.part, record.parity.first.step) == ("gradients", 0)
    assert record.parity.first.name.startswith("layers.3.")
    assert record.parity.first.blocks == {f"layers.{index}": True for index in range(4)}
    assert record.parity.control is not None
    assert record.parity.control.is_equal
    assert record.reason is not None
    assert record.reason.startswith(f"parity: gradient of '{record.parity.first.name}' differs first at ")


def test_memory_at_the_peak_sums_to_it_on_every_mesh(trial: Trial) -> None:
    for line in ("ac=none", "ac=full", "ac=offload", "ac=full mesh=shard2"):
        memory = trial(line).memory
        assert memory is not None
        assert sum(memory.peak_parts.values()) == memory.peak_bytes


def test_equal_parts_differ_by_nothing(trial: Trial) -> None:
    parity = trial(DROPOUT).parity
    assert parity is not None
    assert (parity.level, parity.steps, len(parity.losses)) == ("bitwise", 3, 3)
    for name in PARTS:
        part = getattr(parity, name)
        assert dataclasses.astuple(part) == (True, 0.0, 0.0, None)


def test_a_sharded_trial_halves_what_ranks_share(trial: Trial) -> None:
    single, sharded = trial("ac=full"), trial("ac=full mesh=shard2")
    assert single.memory is not None
    assert sharded.memory is not None
    assert single.work is not None
    assert sharded.work is not None
    assert 2 * sharded.memory.parameter_bytes == single.memory.parameter_bytes
    assert 2 * sharded.memory.gradient_bytes == single.memory.gradient_bytes
    assert 2 * sharded.work.forward_flops == single.work.forward_flops
    assert [memory.rank for memory in sharded.memory.by_rank] == [0, 1]
    units = _L + 1
    assert sharded.work.collectives == {
        "forward": {"all_gather": units},
        "backward": {"all_gather": units, "reduce_scatter": units},
        "optimizer": {},
    }
    assert sharded.work.collective_bytes["forward"] == {"all_gather": single.memory.parameter_bytes}
    assert single.work.collectives == {"forward": {}, "backward": {}, "optimizer": {}}


def test_where_the_twin_does_not_fit_the_variant_is_measured_and_unverified(trial: Trial) -> None:
    record = trial(f"{USER}:needs_checkpointing ac=full")
    assert (record.status, record.verdict, record.parity) == ("ok", "unverified", None)
    assert record.note == "the twin did not fit"
    assert record.memory is not None
    assert record.memory.saved_bytes > 0
    assert record.memory.baseline is None
    assert record.work is not None
    assert record.work.recomputed_flops > 0
    assert record.work.baseline is None


def test_where_two_models_do_not_fit_they_run_one_after_the_other(trial: Trial) -> None:
    record = trial(f"{USER}:fits_once ac=full protocol.timed_pairs=2")
    assert (record.status, record.verdict) == ("ok", "neutral")
    assert record.note == (
        "variant and twin did not fit side by side: they ran one after the other, "
        "and step times are not paired"
    )
    assert record.time is not None
    assert record.time.step_time_s.count == 2


def test_a_rank_and_the_record_say_one_number_of_recomputed_flops(trial: Trial, root: Path) -> None:
    record = trial(OWN_CHECKPOINT)
    assert record.work is not None
    assert record.work.baseline is not None
    rank = json.loads((root / "trials" / record.trial_id / "rank0.json").read_text("utf-8"))["result"]
    assert record.work.baseline.recomputed_flops == 2 * _B * _S * 16 * 256
    assert rank["work"]["recomputed_flops"] == record.work.recomputed_flops == 2 * 2 * _B * _S * 16 * 64
    assert rank["work"]["recomputed_ops"] == record.work.recomputed_ops


def test_outputs_that_cannot_be_compared_are_refused_before_the_first_backward(trial: Trial) -> None:
    record = trial(f"{USER}:returns_an_iterator ac=full")
    assert record.error is not None
    assert (record.status, record.error.kind, record.error.phase) == ("failed", "ConfigError", "instrument")
    assert record.error.message == (
        "model: outputs is a list_iterator, which cannot be read twice; return a list, a tuple or a "
        "dictionary"
    )


def test_example_inputs_have_no_tokens(trial: Trial) -> None:
    record = trial(f"{USER}:regression ac=full")
    assert record.work is not None
    assert record.work.calls == {"layers.0": 2, "layers.1": 2, "layers.2": 2}
    assert record.time is None


def test_a_model_may_have_no_blocks(trial: Trial) -> None:
    work = trial(f"{USER}:regression model.layers_fqn=''").work
    assert work is not None
    assert work.calls == {}


def test_times_are_seconds_of_steps(trial: Trial) -> None:
    time = trial(f"{USER}:reads_values ac=full protocol.timed_pairs=2").time
    assert time is not None
    assert len(time.samples_s.variant) == len(time.samples_s.twin) == time.step_time_s.count
    assert time.step_time_s.p10 <= time.step_time_s.median <= time.step_time_s.p90
    assert time.tokens_per_s == pytest.approx(_B * _S / time.step_time_s.median)
    assert time.ratio_to_baseline is not None
    assert time.ratio_to_baseline.low <= time.ratio_to_baseline.median <= time.ratio_to_baseline.high


def test_a_trial_leaves_its_description_and_its_logs(trial: Trial, root: Path) -> None:
    folder = root / "trials" / trial("ac=full mesh=shard2").trial_id
    steps = ["step0.json.gz", "step1.json.gz"]
    left = [
        ".lock",
        "experiment.yaml",
        "rank0.json",
        "rank0.log",
        "rank1.json",
        "rank1.log",
        "record.json",
        *steps,
    ]
    assert sorted(path.name for path in folder.iterdir()) == left


def test_what_a_trial_changes_for_the_process_is_put_back_and_named(trial: Trial) -> None:
    probes = trial(FLAGGED).probes
    assert probes is not None
    assert probes.notes[-1] == ("left behind by the trial, and put back: torch.set_float32_matmul_precision")
