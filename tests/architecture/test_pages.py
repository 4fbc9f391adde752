"""What a page says to add works as printed: in a copy of the tree, from the page alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("acbench", "harness", "strategies", "conf", "hydra_plugins")
ADDED = [
    "conf/ac/last_blocks.yaml",
    "conf/model/bag_of_tokens.yaml",
    "harness/models/bag_of_tokens.py",
    "harness/models/parts/causal_mean.py",
    "harness/report/content/slow_steps.py",
    "strategies/ac/last_blocks.py",
]
PAGES = ("adding_a_strategy.md", "architecture.md")
_FILE = re.compile(
    r"^`([\w/]+\.(?:py|yaml))`[^\n]*\n(?:[^\n]+\n)*\n```(?:python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
"""A paragraph that begins with the path of a file, and the code behind it."""
_DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree with everything that the pages say to add."""
    copy = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        shutil.copytree(ROOT / name, copy / name)  # with bytecode, which the time of its source makes valid
    shutil.copy(ROOT / "pyproject.toml", copy)
    added = []
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for path, content in _FILE.findall(text):
            assert not (copy / path).exists(), f"{page}: {path} is there already"
            (copy / path).write_text(content, encoding="utf-8")
            added.append(path)
        for diff in _DIFF.findall(text):
            command = ["git", "apply", "--recount", "-"]
            done = subprocess.run(command, cwd=copy, input=diff, text=True, capture_output=True, check=False)
            assert done.returncode == 0, f"{page}: its diff is one of other lines by now: {done.stderr}"
    assert sorted(added) == ADDED
    return copy


def _run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(copy)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def test_import_contracts_hold(copy: Path) -> None:
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = _run(copy, "-c", program, "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_variant_and_the_model_run_and_the_section_is_in_the_report(copy: Path) -> None:
    words = ("model=bag_of_tokens", "ac=last_blocks", "batch_size=2", "sequence_length=32", "name=pages")
    protocol = ("protocol=smoke", "protocol.timed_pairs=2")
    done = _run(copy, "-m", "harness", *words, *protocol, "tracker=none", "strict=true")
    assert done.returncode == 0, done.stdout + done.stderr
    done = _run(copy, "-m", "harness.report.main", "outputs/pages", "--format", "markdown")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (copy / "outputs" / "pages").glob("*.md")
    assert "## Slowest steps" in report.read_text(encoding="utf-8")
