from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.records.store import Store
from harness.report.content.contents import document
from harness.report.facts.document import Number, plain
from harness.report.facts.flat_record import flat_config, flat_summary
from harness.report.facts.sweep_records import load
from harness.report.wandb.publisher import Tracker, publish
from tests.harness.records_fixture import experiment, record
from tests.harness.report.reading import agrees, at, counted
from tests.harness.report.synthetic import sweep
from tests.harness.report.wandb.loopback import accepting_server

pytest.importorskip("wandb_workspaces")
OFFLINE = Tracker(name="offline", project="ours", deadline_s=200)
ONLINE = Tracker(name="online", project="ours", deadline_s=200)
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?: [KMGT]iB| B|%|×)?")  # noqa: RUF001 (times)


def written(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (store.root / "wandb" / "report-specification.json").read_text("utf-8")
    )
    return found


def texts(specification: dict[str, Any]) -> list[str]:
    return [block["content"] for block in specification["blocks"] if block["type"] == "markdown-block"]


def grid(specification: dict[str, Any]) -> dict[str, Any]:
    (found,) = (block["metadata"] for block in specification["blocks"] if block["type"] == "panel-grid")
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("synthetic"))
    for each in sweep(24):
        store.write(each)
    published = publish(store, OFFLINE, with_report=True)
    assert published is not None
    assert (published.published, published.problem) == (24, None)
    return store


def test_numbers_of_the_conclusion_equal_the_store(offline: Store) -> None:
    stored = {each.trial_id: each.to_dict() for each in offline.scan().records}
    lines = texts(written(offline))[0].splitlines()
    statements = document(load(offline.root)).statements
    assert len(lines) == len(statements) > 3
    for line, statement in zip(lines, statements, strict=True):
        numbers = [part for part in statement.line if isinstance(part, Number)]
        shown = [str(part) for part in numbers]
        words = line.removeprefix("* ").replace("\\", "").replace("`", "")
        assert words == plain(statement.line).replace("\\", "").replace("`", "")
        found = _NUMBER.findall(words)
        assert [each for each in shown if each not in found] == []
        for number, text in zip(numbers, shown, strict=True):
            is_count = number.path.startswith("count ")
            value = (
                counted(list(stored.values()), number.path)
                if is_count
                else at(stored[number.trial_id], number.path)
            )
            assert agrees(text, value)


def test_run_sets_by_status_with_pinned_columns(offline: Store) -> None:
    sets = grid(written(offline))["runSets"]
    assert [each["name"] for each in sets] == [
        "ok",
        "oom",
        "failed",
        "timeout",
        "refused",
        "lost",
        "predicted",
    ]
    filters = [(each["key"], each["value"]) for each in sets[1]["filters"]["filters"]]
    assert filters == [
        ({"section": "run", "name": "group"}, offline.root.name),
        ({"section": "summary", "name": "status"}, "oom"),
    ]
    assert list(sets[0]["runFeed"]["columnPinned"])[:2] == ["run:displayName", "config:ac.value"]


def test_panels_address_keys_that_runs_have(offline: Store) -> None:
    panels = grid(written(offline))["panelBankSectionConfig"]["panels"]
    assert [panel["viewType"] for panel in panels] == [
        "Scatter Plot",
        "Bar Chart",
        "Parallel Coordinates Plot",
        "Parameter Importance",
        "Parameter Importance",
    ]
    addressed = set(re.findall(r'"(?:summary:|config:)([a-z_]+)', json.dumps(panels)))
    records = load(offline.root).records
    known = {key for each in records for key in (*flat_config(each), *flat_summary(each))}
    assert addressed == {
        "ac",
        "mesh",
        "model",
        "memory_peak_bytes",
        "work_recomputed_flops",
        "time_ratio_to_baseline_median",
    }
    assert addressed <= known


def test_a_loopback_stub_gets_runs_and_report_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write(record())
    publish(store, OFFLINE, with_report=True)  # what was kept offline is sent later
    with accepting_server() as server:
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        first = publish(store, ONLINE)
        requests = server.requests
        again = publish(store, ONLINE)
        assert server.requests == requests
        store.write(record(experiment("none")))
        third = publish(store, ONLINE)
        url = f"{server.url}/local/ours/reports/acbench:-{tmp_path.name}--view1"
    assert [each and (each.published, each.problem, each.report_url) for each in (first, again, third)] == [
        (1, None, url),
        (0, None, url),
        (1, None, url),
    ]
    assert [view["id"] for view in server.views] == [None, "view1"]
    sent = server.views[-1]
    assert (sent["projectName"], sent["entityName"], sent["type"]) == ("ours", "local", "runs")
    assert json.loads(sent["spec"]) == written(store)


def test_a_current_report_starts_no_process(offline: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    published = publish(offline, OFFLINE, with_report=True)
    assert (published and published.published, published and published.problem) == (0, None)
