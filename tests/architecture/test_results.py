"""Kept results are of commits that the history has, and the page says how old each is."""

from __future__ import annotations

import json
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from docs.tools.keep import KEPT, commits, compact, kept_name
from docs.tools.readme import day_of

ROOT = Path(__file__).parents[2]
FILES = sorted(KEPT.glob("*.json"))
PAGE = (KEPT / "README.md").read_text("utf-8")


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def history() -> None:
    if _git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this checkout has no history, or a part of it")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_kept_file_is_of_a_commit_of_the_history(path: Path, history: None) -> None:  # noqa: ARG001 (it skips)
    (commit,) = commits(json.loads(path.read_text("utf-8")))
    assert _git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, f"{commit} is in no history"
    assert f"| `{path.name}` | `{commit[:8]}` | {day_of(commit)} |" in PAGE, (
        "run python -m docs.tools.readme --only results"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_kept_file_is_named_after_its_commit_and_holds_no_space(path: Path) -> None:
    text = path.read_text("utf-8")
    content = json.loads(text)
    assert text == compact(content)
    if "-" in path.stem:  # one that its benchmark goes on with has its name
        assert path.name == kept_name(path.stem, content)


def test_every_kept_file_is_on_the_page_and_every_name_there_is_a_file() -> None:
    kept = PAGE.partition("## Kept")[2].partition("## How old")[0]
    rows = [line.split("|")[1] for line in kept.splitlines() if line.startswith("| `")]
    patterns = [name.strip(" `") for row in rows for name in row.split(",") if "`" in name]
    names = [path.name for path in KEPT.iterdir()]
    full = [f"{pattern}.json" if pattern.endswith("-*") else pattern for pattern in patterns]
    assert [pattern for pattern in full if not any(fnmatch(name, pattern) for name in names)] == []
    assert [path.name for path in FILES if not any(fnmatch(path.name, pattern) for pattern in full)] == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(
            {"rows": [{"ratio": 1.0837652613816335, "bytes": 76810648, "left": 0.0, "ok": True}]},
            '{"rows":[{"ratio":1.08377,"bytes":76810648,"left":0.0,"ok":true}]}\n',
            id="a benchmark has six digits",
        ),
        pytest.param(
            [{"loss": 1.0837652613816335}], '[{"loss":1.0837652613816335}]\n', id="records have all"
        ),
    ],
)
def test_what_is_kept_of_numbers(content: Any, text: str) -> None:
    assert compact(content) == text


@pytest.mark.parametrize(
    ("commit", "problem"),
    [
        pytest.param("0123456789-dirty", "commit first, then measure", id="changes in no commit"),
        pytest.param(None, "measured at no commit", id="no commit"),
    ],
)
def test_what_cannot_be_kept(commit: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        kept_name("budget", {"environment": {"commit": commit}})


def test_records_of_two_commits_cannot_be_kept() -> None:
    records = [{"environment": {"commit": commit}} for commit in ("0123456789", "9876543210")]
    with pytest.raises(ValueError, match="measured at 2 commits"):
        kept_name("demo", records)
    assert kept_name("demo", records[:1]) == "demo-cpu-01234567.json"
