"""The differential oracle: a slice of it finds nothing, and without a guard it finds what that is for."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bench.stale import examine, main, until_silent
from bench.stale_engines import ENGINES
from bench.stale_guards import GUARDS


@pytest.mark.parametrize(("name", "seed"), [("chunk", 3), ("nested", 3), ("nested", 10)])
def test_a_slice_is_right(name: str, seed: int) -> None:
    found = list(examine(ENGINES[name](), seed, chains=2))
    assert len({each.chain for each in found}) == 2
    assert [each for each in found if each.is_wrong] == []


# guards that stand nowhere else: a hook or a forward inside of a block is refused where it is recorded too
@pytest.mark.parametrize(("guard", "seed"), [("aliasing", 1), ("attributes", 1)])
def test_a_guard_that_is_switched_off_is_missed(guard: str, seed: int) -> None:
    with GUARDS[guard]():
        found = list(islice(until_silent()(ENGINES["chunk"](), seed), 60))
    assert [each.what for each in found if each.is_wrong] == ["silent"]


@pytest.mark.parametrize(
    ("idiom", "seed"),
    [("checkpoints", 504), ("complex", 24), ("hooks", 0), ("configured", 54)],
)
def test_what_a_recording_does_not_see_is_found_where_nothing_is_proven(idiom: str, seed: int) -> None:
    """Two models that draw from generators of their own, of seeds 52 and 106, are no rows here.

    Each of their first 60 calls is right or refused, even where nothing is proven.
    """
    engine = ENGINES["chunk"]()
    with GUARDS["proof"]():
        without = list(islice(until_silent()(engine, seed), 60))
    assert without[-1].what == "silent"
    assert idiom in without[-1].idioms
    assert [each for each in examine(engine, seed, chains=1) if each.is_wrong] == []


def _portion(path: Path, seeds: list[int], calls: int, **protocol: Any) -> str:
    counts = dict.fromkeys(("recorded anew", "refused", "both raise", "silent", "crashed"), 0)
    row = {"engine": "nested", "by": "all", "of": "all", "models": 1, "programs": 2}
    results = {
        "rows": [row | {"calls": calls, "equal": calls} | counts],
        "cpu_s": {"nested": 0.5},
        "wrong": [],
    }
    content = {"protocol": {"seeds": {"nested": [seeds]}, **protocol}, "results": results}
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_portions_are_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [_portion(tmp_path / "a.json", [0, 4], 3), _portion(tmp_path / "b.json", [4, 5], 40)]
    out = tmp_path / "sum.json"
    assert main(["--add", *parts, "--out", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    (row,) = made["results"]["rows"]
    assert (row["models"], row["programs"], row["calls"], row["equal"]) == (2, 4, 43, 43)
    assert made["protocol"]["seeds"] == {"nested": [[0, 4], [4, 5]]}
    assert "nested 43" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seeds", "protocol", "problem"),
    [
        ([3, 5], {}, "stale: portions of 'nested' have seeds in common; use each once"),
        ([4, 5], {"chains": 1}, "stale: the portions have different protocols; make them alike"),
    ],
)
def test_portions_that_do_not_add_up(
    tmp_path: Path, seeds: list[int], protocol: dict[str, Any], problem: str
) -> None:
    parts = [_portion(tmp_path / "a.json", [0, 4], 3), _portion(tmp_path / "b.json", seeds, 4, **protocol)]
    with pytest.raises(SystemExit) as refused:
        main(["--add", *parts])
    assert str(refused.value) == problem
