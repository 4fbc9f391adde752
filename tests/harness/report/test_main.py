from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records.claims import claim, holding, new_submission, write_submission
from harness.records.record import Record
from harness.records.step_trace import write_step
from harness.records.store import Store
from harness.records.store import trial_id as experiment_id
from harness.report.formats.memory_viz import to_memory_viz
from harness.report.formats.perfetto import to_perfetto
from harness.report.main import main
from tests.harness.records_fixture import STARTED, experiment, failed, rank_result, record
from tests.harness.step_fixture import STEP

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store(tmp_path / "before")
    for each in (record(), record(experiment("none")), failed("oom", experiment("offload"))):
        store.write(each)
    return store.root


def kept(*records: Record) -> str:
    return json.dumps([each.to_dict() for each in records])


def slower(ac: str, *, saved: int) -> Record:
    result = rank_result()
    result["memory"]["saved_bytes"] = saved
    result["time"]["variant_s"] = [0.8] * 6
    return record(experiment(ac), result)


def test_formats_are_written_beside_the_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--format", "html,markdown,csv"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"wrote {folder / name}" for name in ("report.html", "report.md", "report.csv")
    ]
    assert said.out.startswith(
        "Use full: 50% less peak memory at 1.25× [1.25, 1.25] the step time.\n"  # noqa: RUF001 (times)
        "gpt_nano with 2.0 MiB of parameters, fp32, on cpu: 1 rank (single).\n"
        "full saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at "
        "1.25× [1.25, 1.25] the step time"  # noqa: RUF001 (times)
    )
    assert {path.name for path in (folder / "figures").iterdir()} == {
        "front.svg",
        "memory.svg",
        "timeline.svg",
        "work.svg",
    }
    assert (folder / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_steps_are_written_for_other_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, oom, none = (
        experiment_id(each) for each in (experiment("full"), experiment("offload"), experiment("none"))
    )
    write_step(STEP, folder / full)
    assert main([str(folder), "--format", "perfetto,memory_viz"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == sorted(
        [
            f"wrote {folder / full / 'perfetto.json'}",
            f"wrote {folder / full / 'memory_viz.pickle'}",
            "acbench-report: none on single: no step was kept",
            "acbench-report: offload on single: it ended oom without a step",
        ]
    )
    assert (folder / full / "perfetto.json").read_text("utf-8") == to_perfetto([STEP], "full on single")
    shown, expected = ((folder / full / "memory_viz.pickle").read_bytes(), to_memory_viz([STEP]))
    assert pickle.loads(shown) == pickle.loads(expected)
    assert not any((folder / other / "perfetto.json").exists() for other in (none, oom))


def test_steps_that_nobody_kept_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--format", "perfetto"]) == 2
    assert capsys.readouterr().err.endswith(
        f"acbench-report: {folder}: none of its trials has kept a step (step0.json.gz); run them again with "
        "rerun=true; of predictions acbench-plan --trace keeps them\n"
    )


def test_another_folder_and_a_name_that_exists_in_no_sweep(folder: Path, tmp_path: Path) -> None:
    assert main([str(folder), "--format", "csv", "--out", str(tmp_path / "new" / "one")]) == 0
    assert (tmp_path / "new" / "one" / "report.csv").is_file()


def test_a_partial_sweep_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, submission = Store(folder), new_submission("driven", STARTED)
    write_submission(store, submission)
    claim(store, ["0123456789ab"], submission.id)
    with holding(store, submission.id):
        assert main([str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    assert "partial: 3 of 4 trials have a record" in page
    assert '<p class="partial" role="status">Partial: trials are still without a record.</p>' in page
    assert "; 1 without a record yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("launcher", "said", "answered"),
    [
        pytest.param(None, "interrupted; the same command continues.", "interrupted: the", id="no claim"),
        pytest.param("driven", "interrupted; the same command continues.", "interrupted: the", id="dead"),
        pytest.param("slurm", "trials are still without a record.", "without a record", id="scheduled"),
    ],
)
def test_what_nobody_runs_was_interrupted(
    folder: Path, capsys: pytest.CaptureFixture[str], launcher: str | None, said: str, answered: str
) -> None:
    store = Store(folder)
    (folder / "0123456789ab").mkdir()
    if launcher is not None:
        submission = new_submission(launcher, STARTED)
        write_submission(store, submission)
        claim(store, ["0123456789ab"], submission.id)
    assert main([str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    assert f'<p class="partial" role="status">Partial: {said}</p>' in page
    assert f"; 1 {answered}" in capsys.readouterr().out


def test_a_torn_record_is_named_and_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "0123456789ab" / "record.json"
    path.parent.mkdir()
    path.write_text("{}")
    assert main([str(folder)]) == 0
    assert (
        f"acbench-report: {path}: record.schema_version: must be 1, got None; left out\n"
        in capsys.readouterr().err
    )


def test_what_changed_stands_first(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = Store(tmp_path / "after")
    for each in (record(experiment("none")), slower("full", saved=4_194_304), record(experiment("nested"))):
        after.write(each)
    assert main([str(folder), str(after.root), "--format", "html,markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 of 2 trials in both sweeps changed: saved of 1, step time vs baseline of 1.",
        "The saved that changed most is that of full on single: 3.0 MiB → 4.0 MiB.",
        "The step time vs baseline that changed most is that of full on single: 1.25× → 2.00×.",  # noqa: RUF001 (times)
        "1 trial is only in before, 1 only in after.",
    ]
    text = (folder / "compared-with-after.md").read_text("utf-8")
    changed, same = text.index("## Changed"), text.index("## Unchanged")
    assert changed < same < text.index("## In one sweep only")
    assert [line for line in text[changed:same].splitlines() if line.startswith("| full on")] == [
        "| full on single | saved, step time vs baseline | ok | neutral |",
        "| full on single | 3.0 MiB → 4.0 MiB | 10.0 MiB | 1.00 G |",
        "| full on single | 1.25× [1.25, 1.25] → 2.00× [2.00, 2.00] |",  # noqa: RUF001 (times)
    ]


def test_what_ended_worse_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = Store(tmp_path / "later" / "before")
    for each in (failed("oom"), record(experiment("none")), record(experiment("offload"))):
        after.write(each)
    assert main([str(folder), str(after.root)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        (
            "2 of 3 trials in both sweeps changed: status of 2, verdict of 2, saved of 2, peak of 2, "
            "recomputed FLOPs of 2, collectives of 2, step time vs baseline of 2."
        ),
        "full on single: neutral → oom.",
    ]
    page = (folder / "compared-with-before.html").read_text("utf-8")
    assert "<h1>before, before → before, after</h1>" in page


def test_an_option_that_only_one_version_has_does_not_part_trials(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = Store(tmp_path / "after")
    for ac in ("full", "none", "nested"):
        after.write(record(experiment(ac, ac={"new": 1}) | {"brand_new": True}))
    assert main([str(folder), str(after.root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0 of 2 trials in both sweeps changed.",
        "2 of them are the same but for options that only one of the sweeps has.",
        "1 trial is only in before, 1 only in after.",
    ]


def test_watching_writes_again_when_a_record_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps = iter([None, record(experiment("nested")), None])

    def nap(_: float) -> None:
        try:
            coming = next(naps)
        except StopIteration:
            raise KeyboardInterrupt from None
        if coming is not None:
            Store(folder).write(coming)

    monkeypatch.setattr("harness.report.main.time.sleep", nap)
    assert main([str(folder), "--watch"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"wrote {folder / 'report.html'}"] * 2
    assert 'data-refresh-s="2"' in (folder / "report.html").read_text("utf-8")


def test_a_record_that_goes_while_it_is_watched_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = folder / record().trial_id
    naps = iter([(gone / "record.json").unlink, gone.rmdir])

    def nap(_: float) -> None:
        try:
            next(naps)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("harness.report.main.time.sleep", nap)
    assert main([str(folder), "--watch"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"wrote {folder / 'report.html'}"] * 3


@pytest.mark.parametrize("words", [[], ["--format", "csv"], ["--format", "markdown"]])
def test_where_nothing_can_be_written_the_remedy_is_named(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert main([str(folder), "--out", str(taken), *words]) == 2
    assert capsys.readouterr().err == (
        f"acbench-report: {taken}: File exists; --out names another folder to write to\n"
    )


def test_a_file_of_records_is_a_sweep_too(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps([each.to_dict() for each in Store(folder).scan().records]))
    assert main([str(kept), "--format", "csv"]) == 0
    assert main([str(folder), "--format", "csv"]) == 0
    assert (tmp_path / "kept" / "report.csv").read_text() == (folder / "report.csv").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{}", "must be a list of records, got a dict", id="no list"),
        pytest.param("[{}]", "record.schema_version: must be 1, got None", id="no record"),
        pytest.param(
            kept(replace(record(), trial_id='"><script>')),
            """record.trial_id: must be 12 hexadecimal digits, got '"><script>'""",
            id="an address that is none",
        ),
        pytest.param(
            kept(record(), record()),
            f"record.trial_id: must occur once, got {record().trial_id!r} again",
            id="a trial twice",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.json").write_text(content)
    assert main([str(tmp_path / "kept.json")]) == 2
    assert capsys.readouterr().err == f"acbench-report: {tmp_path / 'kept.json'}: {message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["nowhere"],
            "nowhere: no such folder or file; give the folder of a sweep, outputs/<name>",
            id="no folder",
        ),
        pytest.param(
            ["nowhere", "--watch"],
            "nowhere: no such folder or file; give the folder of a sweep, outputs/<name>",
            id="watch",
        ),
        pytest.param(["."], ".: no record.json below it; is it the folder of a sweep?", id="no record"),
        pytest.param(
            ["before", "--format", "wandb", "--project", " "],
            "tracker.project: must name a project, got ' '",
            id="no project",
        ),
    ],
)
def test_what_cannot_be_reported_is_refused(
    words: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"acbench-report: {message}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["a", "--format", "pdf"],
            "argument --format: must be one of html, markdown, csv, wandb, perfetto, memory_viz, got 'pdf'",
            id="format",
        ),
        pytest.param(["a", "b", "c"], "at most two sweeps can be compared, got 3", id="three"),
        pytest.param(
            ["a", "b", "--format", "csv"],
            "--format: two sweeps are compared as html or markdown",
            id="compared as csv",
        ),
        pytest.param(["a", "--sync"], "--sync: sends to W&B; add --format wandb", id="sync alone"),
        pytest.param(
            ["a", "--watch", "--format", "csv"], "--watch: follows one sweep, as html", id="watch csv"
        ),
        pytest.param(
            [__file__, "--watch"],
            "--watch: follows the folder of a sweep; a file does not change",
            id="watch a file",
        ),
    ],
)
def test_words_that_make_no_sense(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("{python} -m harness.report.main {folder}", id="any"),
        pytest.param("PYTHONIOENCODING=ascii {python} -m harness.report.main {folder}", id="plain ASCII"),
    ],
)
def test_any_terminal_will_do(command: str, folder: Path) -> None:
    line = command.format(python=sys.executable, folder=folder)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, f"wrote {folder / 'report.html'}\n")


def test_reports_need_neither_torch_nor_hydra_nor_wandb(folder: Path) -> None:
    program = (
        "import sys; sys.modules.update(torch=None, hydra=None, omegaconf=None, wandb=None)\n"
        f"from harness.report.main import main\nfolder = {str(folder)!r}\n"
        "sys.exit(main([folder, '--format', 'html,markdown,csv']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
