"""The commands name a folder of the user that hides a package of acbench."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["harness", "strategies"])
@pytest.mark.parametrize(("function", "command"), [("main", "acbench"), ("report", "acbench-report")])
def test_a_folder_that_hides_ours_is_named(tmp_path: Path, package: str, function: str, command: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    script = f"import hydra_plugins.acbench.entry as entry; entry.{function}()"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        f"{command}: {tmp_path / package} hides a package of acbench with the same"
    )


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "strategies").mkdir()
    script = "import hydra_plugins.acbench.entry as entry; print(entry.folder_hiding('strategies'))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])}
    said = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, env=environment, text=True)
    assert said == "None\n"
