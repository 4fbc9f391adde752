"""What the command says of users' cases: those of the same options are one sweep."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records.record import validate
from harness.records.store import RECORD
from tests.gallery.case import Case
from tests.gallery.checking import FACTORIES, Said

_PROTOCOL = ("tracker=none", "protocol=parity", "mesh.device=cpu")


def said_by_the_command(cases: Mapping[str, Case], *more: str) -> Iterator[tuple[str, Said]]:
    """Yield what the command says of each case.

    Args:
        cases: by name; their variants are options.
        more: further options.
    """
    sweeps: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, case in cases.items():
        sweeps[case.layers_fqn, case.variant].append(name)
    for (layers_fqn, options), names in sweeps.items():
        factories = [f"{FACTORIES}:{name.partition(' ')[0]}" for name in names]
        found = {
            record["experiment"]["model"]["factory"]: record
            for record in records(
                "model=python",
                f"model.factory={','.join(factories)}",
                f"model.layers_fqn={layers_fqn}",
                *options,
                *more,
            )
        }
        for name, factory in zip(names, factories, strict=True):
            yield name, said(found.get(factory))


def records(*overrides: str) -> list[dict[str, Any]]:
    """Run the sweep of `overrides` as a user would and return its records."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", "-m", *_PROTOCOL, "name=users", f"outputs_dir={folder}"]
        ended = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
        paths: Sequence[Path] = sorted(Path(folder, "users").glob(f"*/{RECORD}"))
        assert paths, ended.stderr
        return [json.loads(path.read_text("utf-8")) for path in paths]


def said(record: Mapping[str, Any] | None) -> Said:
    """Return the verdict, or the status of a trial that did not end well, and its sentence."""
    if record is None:
        return Said(verdict="nothing", sentence="")
    if record["status"] != "ok":
        is_refused = record["status"] in {"refused", "failed"}
        verdict = "refused" if is_refused else record["status"]
        return Said(verdict=verdict, sentence=record["error"]["message"])
    found = validate(record)
    return Said(verdict=found.verdict, sentence=found.reason or "")
