"""The commands name a folder of the user that hides a package of acbench."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_plugins.acbench.entry import ended_by_its_reader

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


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("-c 'import hydra_plugins.acbench.entry as e; e.main()' --help", id="acbench"),
        pytest.param("-c 'import hydra_plugins.acbench.entry as e; e.report()' --help", id="acbench-report"),
        pytest.param("-m harness --help", id="python -m harness"),
        pytest.param("-m acbench --help", id="python -m acbench"),
    ],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(program: str) -> None:
    line = f"(sleep 0.2; {sys.executable} {program}; echo $? >&2) | true"
    ended = subprocess.run(["bash", "-c", line], cwd=_ROOT, capture_output=True, text=True, check=False)
    # argparse takes no notice where Python writes without a buffer
    assert ended.stderr in ({"0\n", "141\n"} if "report" in program else {"141\n"})


@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        pytest.param(">&-", 0, "", id="stdout closed"),
        pytest.param("2>&-", 0, "", id="stderr closed"),
        pytest.param("<&- >&- 2>&-", 0, "", id="all closed"),
        pytest.param("2>/dev/full", 0, "", id="stderr full"),
        pytest.param(
            ">/dev/full",
            1,
            "acbench: stdout cannot be written: No space left on device; records are not lost\n",
            id="stdout full",
        ),
    ],
)
def test_a_stream_that_cannot_be_written_ends_nothing(
    tmp_path: Path, streams: str, code: int, said: str
) -> None:
    """What is started meanwhile finds streams that are open, and no file of ours in their place."""
    program = (
        "import os, subprocess, sys; from hydra_plugins.acbench.entry import ended_by_its_reader\n"
        "with ended_by_its_reader():\n"
        "    with open('kept', 'w') as kept:\n"
        "        print('lost'); print('lost', file=sys.stderr)\n"
        "        subprocess.check_call([sys.executable, '-c', 'import os; os.fstat(1), os.fstat(2)'])\n"
        "        kept.write('whole')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(
        ["bash", "-c", f'"$@" {streams}', "bash", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    last = "".join(line for line in ended.stderr.splitlines(keepends=True) if line.startswith("acbench"))
    assert (ended.returncode, last, (tmp_path / "kept").read_text()) == (code, said, "whole")


@pytest.mark.parametrize(
    ("unbuffered", "said"), [("", "line\n"), ("1", "line\npart")], ids=["by lines", "unbuffered"]
)
def test_what_is_said_on_stderr_is_read_at_once(unbuffered: str, said: str) -> None:
    program = (
        "import os, sys; from hydra_plugins.acbench.entry import ended_by_its_reader\n"
        "with ended_by_its_reader():\n"
        "    sys.stderr.write('line\\n'); sys.stderr.write('part'); os._exit(0)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": unbuffered}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr == said


def test_another_broken_pipe_is_no_reader_that_left() -> None:
    with pytest.raises(BrokenPipeError), ended_by_its_reader():
        raise BrokenPipeError


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "strategies").mkdir()
    script = "import hydra_plugins.acbench.entry as entry; print(entry.folder_hiding('strategies'))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])}
    said = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, env=environment, text=True)
    assert said == "None\n"
