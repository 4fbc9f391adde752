"""The sentence on domination names what is a worse choice, on which mesh, and nothing else."""

from __future__ import annotations

import pytest

from harness.records.record import Record
from harness.report.content.domination import baseline_among, domination
from harness.report.content.pareto import pareto_front
from harness.report.facts.document import plain
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import experiment, rank_result, record

END = ": no more memory, no more time in the median, and clearly less of one."


def trial(ac: str, peak: int, step_s: float, mesh: str = "single", shard: str | None = None) -> Record:
    result = rank_result()
    result["memory"]["peak_bytes"] = peak
    result["time"] |= {"variant_s": [step_s] * 6, "twin_s": [1.0] * 6}
    options = {} if shard is None else {"shard": {"name": shard}}
    return record(experiment(ac, mesh, **options), result)


def sentences(records: list[Record]) -> list[str]:
    settings = sweep_of(records, name="demo").by_setting.values()
    fronts = [pareto_front(entries) for entries in settings]
    return [plain(found.line) for found in domination(fronts, names_meshes=len(settings) > 1)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param([trial("full", 10, 1.3), trial("nested", 20, 1.2)], [], id="a trade dominates nothing"),
        pytest.param([trial("full", 10, 1.3)], [], id="one trial"),
        pytest.param([], [], id="none"),
        pytest.param(
            [trial("none", 20, 1.0), trial("full", 10, 1.3), trial("nested", 9, 1.2)],
            ["nested dominates full"],
            id="the plain model trades with both",
        ),
        pytest.param(
            [trial("none", 20, 1.0), trial("full", 20, 1.3)],
            ["the plain model dominates full"],
            id="the plain model dominates",
        ),
        pytest.param(
            [trial("none", 20, 1.0), trial("full", 10, 0.9)],
            ["full dominates the plain model"],
            id="the plain model is dominated",
        ),
        pytest.param(
            [trial("nested", 9, 1.1), *(trial(f"v{place}", 10 + place, 1.2) for place in range(6))],
            ["nested dominates v0, v1, v2, v3 and 2 more"],
            id="many",
        ),
        pytest.param(
            [trial("full", 10, 1.0), trial("nested", 5, 1.5), trial("a", 11, 1.1), trial("b", 6, 1.6)],
            ["nested dominates b"],
            id="two dominate one each: the one with less memory",
        ),
        pytest.param(
            [
                trial(ac, peak, step_s, mesh)
                for mesh in ("single", "shard2")
                for ac, peak, step_s in (("full", 10, 1.3), ("nested", 9, 1.2))
            ],
            ["On single and shard2, nested dominates full"],
            id="meshes that tell the same",
        ),
        pytest.param(
            [
                trial("full", 10, 1.3),
                trial("nested", 9, 1.2),
                trial("full", 8, 1.1, "shard2"),
                trial("nested", 9, 1.2, "shard2"),
            ],
            ["On single, nested dominates full; on shard2, full dominates nested"],
            id="meshes that tell the opposite",
        ),
    ],
)
def test_who_dominates_whom_is_said_once(records: list[Record], expected: list[str]) -> None:
    assert sentences(records) == [f"{clause}{END}" for clause in expected]


def test_beside_sharded_trials_the_baseline_is_the_unsharded_one() -> None:
    one, other = record(experiment("none", "tp2")), trial("none", 9, 1.2, "tp2", "megatron")
    assert str(baseline_among(sweep_of([one], name="demo").entries)) == "the plain model"
    assert str(baseline_among(sweep_of([one, other], name="demo").entries)) == "shard=none"
