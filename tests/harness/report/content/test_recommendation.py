# ruff: noqa: RUF001 (times, as reports write it)
"""The advice names what to use on which mesh, by one rule, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.records.record import Record
from harness.report.content.recommendation import baseline_among, recommendation
from harness.report.facts.document import plain
from harness.report.facts.pareto import pareto_front
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import experiment, rank_result, record

MIB = 1_048_576


def trial(
    ac: str,
    peak_mib: float,
    step_s: float,
    mesh: str = "single",
    shard: str | None = None,
    noise: float = 0.0,
    host: bool = False,
    verdict: str = "neutral",
    pairs: int = 8,
) -> Record:
    """Return a trial of a model that needs 20 MiB in 1 s where nothing is done."""
    result = rank_result()
    result["memory"]["peak_bytes"] = int(peak_mib * MIB)
    if host:
        result["memory"]["host_peak_bytes"] = MIB
    result["time"] |= {
        "variant_s": ([step_s - noise, step_s + noise] * 4)[:pairs],
        "twin_s": [1.0] * pairs,
    }
    options = {} if shard is None else {"shard": {"name": shard}}
    return replace(record(experiment(ac, mesh, **options), result), verdict=verdict)


def sentences(records: list[Record]) -> list[str]:
    settings = sweep_of(records, name="demo").by_setting.values()
    fronts = [pareto_front(entries) for entries in settings]
    return [plain(found.line) for found in recommendation(fronts, names_meshes=len(settings) > 1)]


PLAIN = trial("none", 20, 1.0)
_UNRESOLVED = "at a step time that {} cannot resolve (protocol.timed_pairs=6 or more may)"
FULL = "full: 50% less peak memory at 1.30× [1.30, 1.30] the step time"


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param([], [], id="no record"),
        pytest.param([PLAIN], [], id="the plain model alone"),
        pytest.param([trial("full", 10, 1.3)], [f"Use {FULL}."], id="one trial"),
        pytest.param(
            [trial("full", 10, 1.3, pairs=1)],
            [f"Use full: 50% less peak memory {_UNRESOLVED.format('1 timed pair')}."],
            id="one timed pair",
        ),
        pytest.param(
            [trial("full", 10, 1.3, pairs=5)],
            [f"Use full: 50% less peak memory {_UNRESOLVED.format('5 timed pairs')}."],
            id="a pair too few",
        ),
        pytest.param([trial("full", 10, 1.3, pairs=6)], [f"Use {FULL}."], id="pairs enough"),
        pytest.param(
            [trial("full", 10, 1.0, noise=0.05)],
            [
                (
                    "Use full: 50% less peak memory at 1.00× [0.95, 1.05] the step time, which cannot be "
                    "told from the plain model's."
                )
            ],
            id="an interval around one",
        ),
        pytest.param(
            [PLAIN, trial("full", 10, 1.3), trial("selective_layer", 15, 1.25)],
            [f"Use {FULL}."],
            id="the knee saves twice as much for a fifth more",
        ),
        pytest.param(
            [PLAIN, trial("full", 10, 1.3), trial("selective_layer", 11, 1.1)],
            ["Use selective_layer: 45% less peak memory at 1.10× [1.10, 1.10] the step time."],
            id="the knee saves nearly as much for a third",
        ),
        pytest.param(
            [PLAIN, trial("full", 10, 1.3), trial("selective_layer", 15, 1.15)],
            [f"Use {FULL}."],
            id="on a straight line more bytes win",
        ),
        pytest.param(
            [PLAIN, trial("full", 10, 1.58, noise=0.05), trial("nested", 9.9, 1.57, noise=0.05)],
            [
                (
                    "Use full: 50% less peak memory at 1.58× [1.53, 1.63] the step time; it is simpler "
                    "than nested, which saves 51%."
                )
            ],
            id="within two percent and the noise the simpler",
        ),
        pytest.param(
            [PLAIN, trial("nested", 10, 1.3), trial("full", 9, 1.2, verdict="unverified")],
            ["Use nested: 50% less peak memory at 1.30× [1.30, 1.30] the step time."],
            id="behind what is unproven",
        ),
        pytest.param(
            [
                PLAIN,
                trial("full", 10, 1.2),
                trial("nested", 9.9, 1.5, noise=0.05),
                trial("selective_op", 10.05, 1.5, noise=0.05),
            ],
            ["Use full: 50% less peak memory at 1.20× [1.20, 1.20] the step time."],
            id="no simpler than what is ahead of it",
        ),
        pytest.param(
            [PLAIN, trial("full", 10, 1.6), trial("nested", 10, 1.4)],
            ["Use nested: 50% less peak memory at 1.40× [1.40, 1.40] the step time."],
            id="outside of the noise the faster",
        ),
        pytest.param(
            [PLAIN, trial("full", 10, 1.3), trial("offload", 8, 1.1, host=True)],
            [f"Use {FULL}; offload frees 60% on a GPU, for copies to the host that a CPU cannot time."],
            id="more on a GPU",
        ),
        pytest.param(
            [PLAIN, trial("full", 10, 1.3), trial("nested", 5, 1.1, verdict="differs")],
            [f"Use {FULL}."],
            id="what differs is never advised",
        ),
        pytest.param(
            [PLAIN, trial("nested", 5, 1.1, verdict="unverified")],
            ["Use the plain model: nothing that was timed needs less peak memory."],
            id="nor what is unproven",
        ),
        pytest.param(
            [PLAIN, trial("full", 21, 1.3)],
            ["Use the plain model: nothing that was timed needs less peak memory."],
            id="nothing saves",
        ),
        pytest.param(
            [trial("full", 10, 1.3, mesh) for mesh in ("single", "shard2")],
            [f"On single and shard2, use {FULL}."],
            id="meshes with the same advice",
        ),
        pytest.param(
            [trial("full", 10, 1.3), trial("nested", 10, 1.3, "shard2")],
            [f"On single, use {FULL}; on shard2, use {FULL.replace('full', 'nested')}."],
            id="meshes with other advice",
        ),
        pytest.param(
            [trial("none", 9, 1.2, "tp2", "megatron")],
            [
                (
                    "Use none + shard megatron: 55% less peak memory than shard=none on the same mesh at "
                    "1.20× [1.20, 1.20] the step time."
                )
            ],
            id="a sharding",
        ),
    ],
)
def test_the_rule_says_what_to_use(records: list[Record], expected: list[str]) -> None:
    assert sentences(records) == expected


def test_beside_sharded_trials_the_baseline_is_the_unsharded_one() -> None:
    one, other = record(experiment("none", "tp2")), trial("none", 9, 1.2, "tp2", "megatron")
    assert str(baseline_among(sweep_of([one], name="demo").entries)) == "the plain model"
    assert str(baseline_among(sweep_of([one, other], name="demo").entries)) == "shard=none"
