"""`acbench-report outputs/<name>`: the report of a sweep, finished or running; of two, what changed."""

from __future__ import annotations

import argparse
import gc
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from harness.errors import ConfigError
from harness.records.claims import is_abandoned
from harness.records.files import SHARED, make_folder, write_atomically
from harness.records.step_trace import StepTrace, read_steps
from harness.records.store import RECORD, Store
from harness.report.content.changes import changes
from harness.report.content.contents import document
from harness.report.content.fail_if import QUANTITIES, WORDS, FailIf, failing, parse
from harness.report.content.terminal_table import print_sweep
from harness.report.facts.document import Document, Figure, plain
from harness.report.facts.number_words import printable
from harness.report.facts.sweep_records import SweepRecords, UnreadableError, load
from harness.report.formats.csv import to_csv
from harness.report.formats.html import to_html
from harness.report.formats.markdown import to_markdown, to_svg
from harness.report.formats.memory_viz import to_memory_viz
from harness.report.formats.perfetto import to_perfetto
from harness.report.odd_records import odd_records
from harness.report.wandb.publisher import Tracker, publish


@dataclass(frozen=True, slots=True)
class _TraceFormat:
    """A format of another program that shows the step of a trial.

    Fields:
        file: name of the file in the folder of the trial.
        content: makes it of the steps of all ranks and of the name of the trial.
    """

    file: str
    content: Callable[[Sequence[StepTrace], str], str | bytes]


_TRACES: Mapping[str, _TraceFormat] = {
    "perfetto": _TraceFormat("perfetto.json", to_perfetto),
    "memory_viz": _TraceFormat("memory_viz.pickle", lambda steps, _: to_memory_viz(steps)),
}

FORMATS = ("html", "markdown", "csv", "wandb", *_TRACES)

_DEFAULT = Tracker()
_REFUSED = 2
_WATCH_S = 2.0
_MOST_PRINTED = 200  # rows on a terminal; files have all
_FIGURES = "figures"
_MOST_COMPARED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its answer.

    Exit status 1 when something was not sent or a trial meets `--fail-if`, 2 when nothing was done.
    """
    options = _options(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that has no ≈ is told \\u2248
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _made_or_refused(options)
    except KeyboardInterrupt:
        return 0 if options.watch else 1


def _made_or_refused(options: argparse.Namespace) -> int:
    """Write what was asked for, or say in a sentence why not; return the exit status."""
    try:
        if options.watch:
            return _watch(options)
        with _no_collector():
            return _report_what_can_be_shown(options)
    except FileNotFoundError as error:
        where = error.filename or error.args[0]
        return _refuse(f"{where}: no such folder or file; give the folder of a sweep, outputs/<name>")
    except (UnreadableError, ConfigError) as error:
        return _refuse(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}; --out names another folder to write to")


@contextmanager
def _no_collector() -> Iterator[None]:
    """Look for no cycles: records are many objects without any, and looking takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, or leave with a message about them."""
    parser = argparse.ArgumentParser(prog="acbench-report", description=__doc__)
    parser.add_argument("sweeps", type=Path, nargs="+", metavar="SWEEP", help="its folder; two are compared")
    parser.add_argument(
        "--format", type=_formats, default=("html",), help=f"comma-separated, of {', '.join(FORMATS)}; html"
    )
    parser.add_argument(
        "--fail-if",
        type=_condition,
        action="append",
        default=[],
        metavar="CONDITION",
        help="with two sweeps, baseline and candidate: exit with 1 and the trials that meet it; a number "
        "by its ratio candidate / baseline ('peak_bytes>1.02'), a word as it is ('verdict!=neutral'); may be "
        f"given again. Numbers: {', '.join(QUANTITIES)}. Words: {', '.join(WORDS)}",
    )
    parser.add_argument("--version", action="version", version=f"acbench {version('acbench')}")
    parser.add_argument("--out", type=Path, help="folder to write to; that of the first sweep")
    parser.add_argument(
        "--watch", action="store_true", help="write again whenever a record comes, until Ctrl-C"
    )
    wandb = parser.add_argument_group("W&B, with --format wandb")
    wandb.add_argument("--sync", action="store_true", help="send what is kept; otherwise it stays here")
    wandb.add_argument("--project", default=_DEFAULT.project, help=_DEFAULT.project)
    wandb.add_argument("--entity", default=_DEFAULT.entity, help="the account's default")
    wandb.add_argument("--deadline-s", type=float, default=_DEFAULT.deadline_s, help="for all of it")
    options = parser.parse_args(arguments)
    refusal = next((why for is_wrong, why in _checks(options) if is_wrong), None)
    if refusal is not None:
        parser.error(refusal)
    return options


def _checks(options: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Yield what must not be asked for, with what to ask for instead."""
    first, count, formats = options.sweeps[0], len(options.sweeps), set(options.format)
    yield count > _MOST_COMPARED, f"at most two sweeps can be compared, got {count}"
    is_alone = bool(options.fail_if) and count != _MOST_COMPARED
    yield is_alone, "--fail-if: compares two sweeps; give the baseline's folder, then the candidate's"
    is_other = count == _MOST_COMPARED and not formats <= {"html", "markdown"}
    yield is_other, "--format: two sweeps are compared as html or markdown"
    wants_wandb = "wandb" in formats
    is_homeless = wants_wandb and not first.is_dir()
    yield is_homeless, "--format: wandb keeps its files in the folder of a sweep; give that"
    is_loose = bool(formats & set(_TRACES)) and not first.is_dir()
    yield is_loose, f"--format: {' and '.join(_TRACES)} need the folder of a sweep, where steps are kept"
    yield options.sync and not wants_wandb, "--sync: sends to W&B; add --format wandb"
    yield options.watch and (count > 1 or formats != {"html"}), "--watch: follows one sweep, as html"
    yield options.watch and first.is_file(), "--watch: follows the folder of a sweep; a file does not change"


def _condition(text: str) -> FailIf:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(FORMATS)}, got {unknown[0]!r}")
    return names


def _report_what_can_be_shown(options: argparse.Namespace, refresh_s: int | None = None) -> int:
    """Write the report; records that no report can show are listed and left out."""
    try:
        return _report(options, _loaded(options.sweeps), refresh_s)
    except (BrokenPipeError, UnreadableError, ConfigError):
        raise
    except Exception:
        odd = [odd_records(root) for root in options.sweeps]
        if not any(odd):
            raise  # it is no record's fault
    return _report(options, _loaded(options.sweeps, odd), refresh_s)


def _loaded(roots: Sequence[Path], odd: Sequence[Mapping[str, str]] = ({}, {})) -> list[SweepRecords]:
    return [load(root, number=number, odd=odd[number]) for number, root in enumerate(roots)]


def _report(options: argparse.Namespace, sweeps: Sequence[SweepRecords], refresh_s: int | None = None) -> int:
    """Write the report of one sweep, or the comparison of two; return the exit status."""
    for sweep, root in zip(sweeps, options.sweeps, strict=True):
        _require_records(sweep, root)
    is_one, records = len(sweeps) == 1, sum(len(sweep.entries) for sweep in sweeps)
    content = document(sweeps[0]) if is_one else changes(*sweeps)
    name = "report" if is_one else f"compared-with-{sweeps[1].name}"
    root = options.sweeps[0]
    # into the sweep's folder, or one next to a file of records, of its name
    folder = options.out or (root.with_suffix("") if root.is_file() else root)
    make_folder(folder)
    writers: dict[str, Callable[[], None]] = {
        "html": lambda: _write(
            folder / f"{name}.html", to_html(content, records=records, refresh_s=refresh_s)
        ),
        "markdown": lambda: _write_markdown(content, folder, name),
        "csv": lambda: _write(folder / f"{name}.csv", to_csv(sweeps[0].records)),
    }
    for made in filter(options.format.__contains__, writers):
        writers[made]()
    if kinds := [kind for kind in options.format if kind in _TRACES]:
        _write_traces(sweeps[0], root, options.out or root, kinds)
    _print(content, sweeps[0] if is_one and refresh_s is None else None)
    if options.fail_if:
        return _judged(options.fail_if, *sweeps)
    return _send(options) if "wandb" in options.format else 0


def _judged(conditions: Sequence[FailIf], before: SweepRecords, after: SweepRecords) -> int:
    """Print which trials meet which condition; 1 where one does."""
    code = 0
    for condition in conditions:
        lines = list(failing(condition, before, after))
        code = max(code, int(bool(lines)))
        sys.stdout.write(f"fail-if {condition}: {len(lines) or 'no'} trial{'' if len(lines) == 1 else 's'}\n")
        sys.stdout.writelines(f"  {line}\n" for line in lines)
    return code


def _print(content: Document, sweep: SweepRecords | None) -> None:
    """Print the answer, and the table of the sweep unless it has too many trials."""
    sys.stdout.writelines(f"{plain(statement.line)}\n" for statement in content.statements)
    if sweep is not None and len(sweep.entries) <= _MOST_PRINTED:
        print_sweep(sweep, sweep.entries)


def _require_records(sweep: SweepRecords, root: Path) -> None:
    """Refuse a folder without records; name the files that should be records and are none."""
    for each in sweep.unreadable:
        sys.stderr.write(f"acbench-report: {each.path}: {printable(each.reason)}; left out\n")
    if not sweep.entries:
        waiting = f", {len(sweep.waiting)} trials without one yet" if sweep.waiting else ""
        raise UnreadableError(f"{root}: no {RECORD} below it{waiting}; is it the folder of a sweep?")


def _write_markdown(content: Document, folder: Path, name: str) -> None:
    figures = [item for item in content.items if isinstance(item, Figure)]
    if figures:
        make_folder(folder / _FIGURES, within=folder)
    for figure in figures:
        path = folder / _FIGURES / f"{figure.key}.svg"
        write_atomically(path, to_svg(figure), within=folder, mode=SHARED)
    _write(folder / f"{name}.md", to_markdown(content, _FIGURES))


def _write_traces(sweep: SweepRecords, root: Path, folder: Path, kinds: Sequence[str]) -> None:
    """Write the step of each trial for other programs, and say which trials have kept none.

    Raises:
        UnreadableError: none has.
    """
    missing = []
    for entry in sweep.entries:
        try:
            # a run that ended before it was measured leaves the step of an earlier one
            steps = read_steps(root / entry.trial_id) if entry.record.memory is not None else []
        except ValueError as error:
            raise UnreadableError(str(error)) from error
        if not steps:
            missing.append(entry)
            continue
        make_folder(folder / entry.trial_id, within=folder)
        for kind in kinds:
            path = folder / entry.trial_id / _TRACES[kind].file
            write_atomically(path, _TRACES[kind].content(steps, entry.name), within=folder, mode=SHARED)
            sys.stderr.write(f"wrote {path}\n")
    if len(missing) == len(sweep.entries):
        remedy = "run them again with rerun=true; of predictions acbench-plan --trace keeps them"
        raise UnreadableError(f"{root}: none of its trials has kept a step (step0.json.gz); {remedy}")
    for entry in missing:
        why = "no step was kept" if entry.record.memory else f"it ended {entry.record.status} without a step"
        sys.stderr.write(f"acbench-report: {entry.name}: {why}\n")


def _send(options: argparse.Namespace) -> int:
    """Keep runs and report for W&B, and send them where `--sync` asks for it; 1 where that failed."""
    tracker = Tracker(
        name="online" if options.sync else "offline",
        project=options.project,
        entity=options.entity,
        deadline_s=options.deadline_s,
    )
    published = publish(Store(options.sweeps[0]), tracker, with_report=True)
    sys.stderr.write(f"{published}\n")
    return int(published is None or published.problem is not None)


def _write(path: Path, text: str) -> None:
    write_atomically(path, text, mode=SHARED)
    sys.stderr.write(f"wrote {path}\n")


def _watch(options: argparse.Namespace) -> int:
    """Write the report again whenever a record has come or changed, until interrupted."""
    (root,) = options.sweeps
    seen: object = None
    while True:
        state = _state(root)
        if state != seen:
            seen = state
            with _no_collector(), suppress(UnreadableError):  # nothing to show yet
                _report_what_can_be_shown(options, refresh_s=int(_WATCH_S))
        time.sleep(_WATCH_S)


def _state(root: Path) -> tuple[list[tuple[str, int]], bool]:
    """Return what changes whenever a trial starts to wait or ends, or the command that runs them is gone."""
    if not root.is_dir():
        raise FileNotFoundError(root)
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    changed = [(folder.name, _changed_ns(folder / RECORD)) for folder in folders]
    return changed, is_abandoned(Store(root), [name for name, changed_ns in changed if not changed_ns])


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _refuse(message: str) -> int:
    sys.stderr.write(f"acbench-report: {message}\n")
    return _REFUSED


if __name__ == "__main__":
    sys.exit(main())
