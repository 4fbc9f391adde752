"""Imports point one way, as the contracts in pyproject.toml say."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_import_contracts_are_kept() -> None:
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "text", "contract"),
    [
        pytest.param(
            "strategies/ac/mine.py",
            "from strategies.ac.full import Full",
            "Variants never import one another",
            id="a variant imports another",
        ),
        pytest.param(
            "harness/measure/planned.py",
            "from strategies.budget.plan import Plan",
            "Meters know what strategies estimate and what a step did, and no strategy",
            id="a meter imports the planner",
        ),
    ],
)
def test_a_new_file_is_held_to_the_contracts(file: str, text: str, contract: str, tmp_path: Path) -> None:
    """They forbid by rule: no list has to name the file first."""
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    for package in ("acbench", "harness", "strategies"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / file).write_text(f'"""New."""\n\n{text}\n', encoding="utf-8")
    program = (
        "import sys; sys.path.insert(0, '.'); "
        "from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert [line.partition(" BROKEN")[0] for line in broken] == [contract]


@pytest.mark.parametrize("package", ["acbench", "harness", "strategies", "hydra_plugins"])
def test_imports_stand_at_the_top_of_a_module(package: str) -> None:
    """An import inside a function is an edge that nobody sees; the few allowed ones say why."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        lines = path.read_text("utf-8").splitlines()
        if not any(line.startswith(" ") and "import" in line for line in lines):  # spares a parse of most
            continue
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            imports = [item for item in ast.walk(node) if isinstance(item, ast.Import | ast.ImportFrom)]
            found += [
                f"{path.relative_to(ROOT)}:{item.lineno}"
                for item in imports
                if "PLC0415" not in lines[item.lineno - 1]
            ]
    assert found == []


@pytest.mark.parametrize(
    "module", ["harness.records.record", "harness.records.store", "harness.report.content.terminal_table"]
)
def test_records_are_read_without_torch(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
