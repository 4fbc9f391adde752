"""Write the generated parts of the documentation.

`python -m docs.tools.readme` replaces what stands between `<!-- name -->` and `<!-- /name -->` on the pages
that have these marks, and writes a page of each kept sweep below docs/results, whose numbers and figures the
README shows.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from docs.tools.compatibility import compatibility_tables
from docs.tools.keep import KEPT, commits
from docs.tools.meshes import repeats_table
from docs.tools.pipelines import schedule_table
from harness.records.record import Record
from harness.report.content.terminal_table import sheet
from harness.report.facts.sweep_records import load, named
from harness.report.main import main as write_reports
from strategies import Strategy, ac_variants

_ROOT = Path(__file__).parents[2]
_TRAITS = ("Saved", "Recomputed", "Moved")
_COLUMNS = 110  # of the README
_SHOWN = (
    "variant",
    "mesh",
    "verdict",
    "saved",
    "peak",
    "step time vs baseline",
    "recomputed FLOPs",
)


def main() -> int:
    """Rewrite the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("demo", "variants", "nested", "compat", "pipelines", "meshes", "results")
    parser.add_argument("--only", choices=names, help="leave the others as they are")
    only = parser.parse_args().only
    chosen = names if only is None else (only,)
    for name, page, mark, content in PARTS:
        if name in chosen:
            path = _ROOT / page
            path.write_text(replaced(path.read_text(encoding="utf-8"), mark, content()), encoding="utf-8")
    if "results" in chosen:
        for kept in kept_sweeps():
            write_reports([str(kept), "--format", "markdown"])
    return 0


def kept_sweeps() -> list[Path]:
    """Return the files below docs/results that are lists of records; the others are results of benchmarks."""
    files = sorted((_ROOT / "docs" / "results").glob("*.json"))
    return [path for path in files if path.read_text(encoding="utf-8").startswith("[")]


def demo_table() -> str:
    """Return the kept records of the demo as a markdown table, meshes together."""
    (demo,) = (path for path in kept_sweeps() if path.stem.startswith("demo-"))
    found = sorted(load(demo).records, key=_place)
    content = sheet(named(found))
    kept = [content.columns.index(name) for name in _SHOWN]
    rows = [[row[index] for index in kept] for row in content.rows]
    return markdown(_SHOWN, rows)


def _place(record: Record) -> tuple[bool, bool, str]:
    """Return where a record stands: one rank first, then the plain model, then by name."""
    mesh, variant = (record.experiment[group]["name"] for group in ("mesh", "ac"))
    return mesh != "single", variant != "none", variant


def variant_table() -> str:
    """Return what every variant's docstring says it saves, recomputes and moves."""
    rows = [[f"`ac={name}`", *traits(variant)] for name, variant in ac_variants.items() if name != "none"]
    return markdown(("variant", *(trait.lower() for trait in _TRAITS)), rows)


def use_list() -> str:
    """Return when to use each variant, by its docstring, in lines as short as those of pages."""
    items = {name: _sentences(variant, "Use when") for name, variant in ac_variants.items() if name != "none"}
    lines = [f"* `ac={name}` when {sentence}" for name, sentence in items.items()]
    return "\n".join(textwrap.fill(line, _COLUMNS, subsequent_indent="  ") for line in lines)


def nested_table() -> str:
    """Return the kept result of `bench.nested`, in inputs of a block."""
    (path,) = (_ROOT / "docs" / "results").glob("nested-cpu-*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    unit, flops = (content["protocol"][name] for name in ("block_input_bytes", "blocks_flops"))
    steps = content["results"]["steps"]
    by_stop = [[row for row in steps if row["early_stop"] == stop] for stop in (True, False)]
    to_the_end = {tuple(row["levels"]): row for row in by_stop[1]}
    rows = [
        [
            f"`{row['levels']}`" if row["levels"] else "`ac=none`",
            f"{(row['saved_bytes'] - row['rng_bytes']) / unit:.1f}",
            f"{row['activation_peak_bytes'] / unit:.1f}",
            f"{row['recomputed_flops'] / flops:.2f}",
            f"{to_the_end.get(tuple(row['levels']), row)['recomputed_flops'] / flops:.2f}",
        ]
        for row in by_stop[0]
    ]
    columns = ("levels", "saved", "activation peak", "recomputed forwards", "without early stop")
    return markdown(columns, rows)


def age_table() -> str:
    """Return the commit of every kept file and its day."""
    rows = []
    for path in sorted(KEPT.glob("*.json")):
        (commit,) = commits(json.loads(path.read_text(encoding="utf-8")))
        rows.append([f"`{path.name}`", f"`{commit[:8]}`", day_of(commit)])
    return markdown(("file", "commit", "of"), rows)


def day_of(commit: str) -> str:
    """Return the day of a commit.

    Raises:
        CalledProcessError: the history does not have it.
    """
    words = ["git", "show", "--no-patch", "--format=%cs", commit]
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, check=True)  # noqa: S603 (git)
    return done.stdout.strip()


def traits(variant: type[Strategy]) -> list[str]:
    """Return the sentences after `Saved:`, `Recomputed:` and `Moved:` in a docstring."""
    return [_sentences(variant, trait) for trait in _TRAITS]


def _sentences(variant: type[Strategy], trait: str) -> str:
    text = inspect.getdoc(variant) or ""
    found = re.search(rf"^{trait}: (.+?)(?=\n\S|\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(found.group(1).split()) if found else ""


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """Return a markdown table."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(text: str, name: str, content: str) -> str:
    """Return `text` with `content` between the marks of `name`.

    Raises:
        ValueError: the marks are missing.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no marks <!-- {name} --> and <!-- /{name} -->")
    return pattern.sub(lambda match: f"{match.group(1)}{content}\n{match.group(2)}", text)


PARTS: tuple[tuple[str, str, str, Callable[[], str]], ...] = (
    ("demo", "README.md", "demo", demo_table),
    ("variants", "docs/variants.md", "use", use_list),
    ("variants", "docs/variants.md", "variants", variant_table),
    ("nested", "docs/nested.md", "nested", nested_table),
    ("compat", "docs/compatibility.md", "compat", compatibility_tables),
    ("pipelines", "docs/pipelines.md", "schedules", schedule_table),
    ("meshes", "docs/meshes.md", "repeats", repeats_table),
    ("results", "docs/results/README.md", "ages", age_table),
)
"""Option of `--only`, page, marks, and what stands between them."""

if __name__ == "__main__":
    sys.exit(main())
