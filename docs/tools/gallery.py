"""Write docs/gallery/README.md from the entries of the gallery and what the check said of them.

    python -m docs.tools.gallery

What the check said comes from the kept results of `tests.gallery.judge`, one a release of torch.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gallery import parts
from tests.gallery.case import Case, Evidence
from tests.gallery.entries import CONTROLS, DEFECTS, Entry, loaded, step_entries
from tests.gallery.pipelines import stages

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "gallery" / "README.md"
STEPS_PAGE = PAGE.parent / "pipelines.md"

_HEAD = """\
# Gallery of silent defects

Each entry is a small program in which activation checkpointing goes wrong and torch raises no error. That
a defect is real is measured without acbench: the plain model trains beside the checkpointed one, with the
same seeds (`tests/gallery/side_by_side.py`; every entry is a test). Only then `assert_neutral` judges.
Controls look like defects and are right.

```console
$ make gallery                            # judges all entries, prints the table
$ python -m tests.gallery.judge --only n13      # one entry
```

Defects of pipelines and of gradients that accumulate stand [apart](pipelines.md).

`gradients` is the relative error of the worst gradient in the first step that differs; `none`: one is
missing; empty where the plain model raises. Entries keep their numbers: messages of `assert_neutral` name
them.
"""

_STEPS_HEAD = """\
# Steps in micro-batches

What goes wrong where checkpointing meets several micro-batches in flight, or a backward in two parts. A test
runs each entry with torch alone: most are a schedule of `torch.distributed.pipelining` with two stages on one
rank. `here` is what this package makes of it, which tests and the [legality matrix](../legality.md) run too.
"""

_PARTS = """\
## What entries share

Every entry is a `Case` with `make`, `batch` and `variant`, as `assert_neutral(make, batch, variant)` takes
them. They use these parts of `tests/gallery/parts.py`:
"""


def main() -> int:
    """Rewrite the page."""
    PAGE.parent.mkdir(exist_ok=True)
    for path, written in ((PAGE, page()), (STEPS_PAGE, steps_page())):
        path.write_text(written, encoding="utf-8")
        print(path)
    return 0


def steps_page() -> str:
    """Return the page of defects of steps in micro-batches."""
    entries = step_entries()
    lines = [_STEPS_HEAD, "| | defect | torch alone | here | verdict |", "| --- | --- | --- | --- | --- |"]
    for name, entry in entries.items():
        number = name.partition("_")[0]
        cells = f"{_in_cell(entry.case.says)} | {entry.case.here} | {entry.case.verdict}"
        lines.append(f"| [{number}](#{number}) | {entry.title} | {cells} |")
    shared = inspect.getsource(stages)
    for name, entry in entries.items():
        number, case = name.partition("_")[0], entry.case
        upstream = f" Upstream: {case.link}" if case.link else ""
        lines += [
            f"\n## {number}\n\n{entry.title}\n",
            f"```python\n{entry.code}\n```\n",
            f"Cause: {case.why} Fix: {case.fix}{upstream}",
        ]
    blocks = shared[shared.index("class Block") : shared.index("def apart")].rstrip()
    return "\n".join([*lines, f"\n## What they share\n\n```python\n{blocks}\n```"]) + "\n"


def _in_cell(text: str) -> str:
    """Return text as a cell of a table holds it."""
    return text.replace("|", "\\|")


def page() -> str:
    """Return the page."""
    kept = _kept()
    defects, controls = list(loaded(DEFECTS)), list(loaded(CONTROLS))
    shared = "\n\n\n".join(
        inspect.getsource(getattr(parts, name)).rstrip()
        for name in ("Blocks", "Rooted", "Dense", "linear", "rows", "run_by", "checkpointed")
    )
    blocks = [
        _HEAD,
        _counts(kept),
        "## Defects\n",
        _index(defects, kept),
        f"{_PARTS}\n```python\n{shared}\n```\n",
        *(_section(entry, kept) for entry in defects),
        "## Controls\n",
        _controls(controls, kept),
    ]
    return "\n".join(blocks)


def measured(case: Case) -> str:
    """Return what the side-by-side training shows, in words."""
    evidence = _evidence(case)
    if case.verdict == "inert":
        return "losses and gradients are equal, and nothing that was asked for happens"
    if "hides_error" in evidence.parts:
        return "the plain model raises; the checkpointed one trains on"
    told = {
        "loss": "the loss differs",
        "gradients": f"gradients are {_error(evidence)}",
        "buffers": "buffers differ",
        "state": "attributes of modules differ",
        "rng_state": "the state of a generator differs",
        "leak": "each step leaves more memory behind",
    }
    equal = [] if "loss" in evidence.parts else ["the loss is bitwise equal"]
    return ", ".join([*equal, *(told[part] for part in evidence.parts)])


def _error(evidence: Evidence) -> str:
    if evidence.gradients is None:
        return "wrong by another number in every run"
    return (
        "missing"
        if evidence.gradients == float("inf")
        else f"wrong by {evidence.gradients:.2g} of their norm"
    )


def _evidence(case: Case) -> Evidence:
    assert case.evidence is not None, "a defect is measured before it stands here"
    return case.evidence


def _kept() -> Mapping[str, Mapping[str, Any]]:
    """Return the results of the check by release of torch, and in each by entry; files add to one another."""
    files = sorted((_ROOT / "docs" / "results").glob("gallery_*-cpu-*.json"))
    kept: dict[str, dict[str, Any]] = {}
    for path in files:
        content = json.loads(path.read_text("utf-8"))
        release = content["environment"]["torch"].partition("+")[0]
        kept.setdefault(release, {}).update((row["name"], row) for row in content["results"])
    return kept


def _counts(kept: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| torch | defects found | culprit named | controls passed |", "| --- | --- | --- | --- |"]
    for release, rows in kept.items():
        defects, controls = ([row for row in rows.values() if row["name"].startswith(kind)] for kind in "nc")
        found, named = (
            sum(row["is_right"] for row in defects),
            sum(row["is_right"] and row["is_named"] for row in defects),
        )
        passed = sum(row["is_right"] for row in controls)
        lines.append(f"| {release} | {found} of {len(defects)} | {named} | {passed} of {len(controls)} |")
    return "\n".join(lines) + "\n"


def _index(defects: list[Entry], kept: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| | defect | gradients | " + " | ".join(kept) + " |", "| --- " * (3 + len(kept)) + "|"]
    for entry in defects:
        evidence = _evidence(entry.case)
        answers = " | ".join(_answer(rows.get(entry.name)) for rows in kept.values())
        shown = {None: "vary", 0.0: "right", float("inf"): "none"}
        error = (
            "" if "hides_error" in evidence.parts else shown.get(evidence.gradients, f"{evidence.gradients}")
        )
        lines.append(f"| {entry.number} | [{entry.title}](#{_anchor(entry)}) | {error} | {answers} |")
    return "\n".join(lines) + "\n"


def _answer(row: Mapping[str, Any] | None) -> str:
    if row is None or row["verdict"] == "not run":
        return "not run"
    verdict = row["verdict"] if row["part"] is None else f"{row['verdict']}: {row['part']}"
    return verdict if row["is_right"] else f"{verdict} (**wrong**)"


def _heading(entry: Entry) -> str:
    return f"{entry.number}. {entry.title.rstrip('.')}"


def _anchor(entry: Entry) -> str:
    kept = "".join(letter for letter in _heading(entry).lower() if letter.isalnum() or letter in "_- ")
    return kept.replace(" ", "-")


def _section(entry: Entry, kept: Mapping[str, Mapping[str, Any]]) -> str:
    case, warned = entry.case, _evidence(entry.case).torch_says
    says = f"torch warns: `{warned}`" if warned else "torch says nothing"
    lines = [
        f'<a id="n{entry.number}"></a>\n',  # what messages of the check point to
        f"### {_heading(entry)}\n",
        f"Measured: {measured(case)}; {says}.\n",
        f"```python\n{entry.code}\n```\n",
    ]
    answers = [rows[entry.name] for rows in kept.values() if entry.name in rows]
    if answers:
        lines.append(f"```text\n{answers[0]['message']}\n```\n")
    upstream = f" Upstream: {case.link}" if case.link else ""
    lines.append(f"Cause: {case.why} Fix: {case.fix}{upstream}\n")
    return "\n".join(lines)


def _controls(controls: list[Entry], kept: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| | control | like | why it is right | " + " | ".join(kept) + " |"]
    lines.append("| --- " * (4 + len(kept)) + "|")
    for entry in controls:
        answers = " | ".join(_answer(rows.get(entry.name)) for rows in kept.values())
        source = f"[{entry.title}](../../tests/gallery/controls/{entry.name}.py)"
        lines.append(
            f"| {entry.number} | {source} | {entry.case.like or ''} | {entry.case.why} | {answers} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
