"""The commands answer without torch, and what waits is an ordinary module for whoever reads it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWEEP = (
    "-m",
    "model=mlp",
    "ac=glob(*)",
    "mesh.device=cpu",
    "protocol=parity",
    "tracker=none",
    "model.n_layers=2",
    "model.width=16",
    "model.hidden_width=32",
)
HEAVY = re.compile(r"\b(torch\._C|torch\.nn|scipy|transformers|submitit|wandb)\b")
REFUSALS = {
    "unknown choice": ("ac=ful", "ac: unknown option 'ful'"),
    "unknown option": ("+ac.freq=2", "ac.freq"),
    "wrong type": ("seed=x", "seed: must be an integer, got 'x'"),
    "out of range": ("ac=selective_layer ac.ac_freq=0", "ac.ac_freq: must be at least 1, got 0"),
    "no such operator group": ("ac=selective_op ac.save_ops=none", "'none' is no preset"),
    "impossible combination": ("wrap_order=outside_fsdp", "wrap_order: outside_fsdp needs FSDP"),
    "indivisible size": ("mesh.tp=3 mesh.device=cpu", "mesh.tp: must divide model.hidden_width"),
}


def _run(*words: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a module as a command; return how it ended and the heavy modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.splitlines()
    imported = [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]
    return done, [name for name in imported if HEAVY.match(name)]


def test_help_needs_no_torch() -> None:
    done, heavy = _run("harness", "--help")
    assert (done.returncode, heavy) == (0, [])


@pytest.mark.parametrize(("words", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_by_the_configuration_needs_no_torch(words: str, message: str) -> None:
    done, heavy = _run("harness", "model=mlp", *words.split())
    assert (done.returncode, heavy) == (2, [])
    assert message in done.stderr


@pytest.mark.slow
def test_a_finished_sweep_and_its_report_need_no_torch(tmp_path: Path) -> None:
    command = ("harness", *SWEEP, f"outputs_dir={tmp_path}")
    first, heavy = _run(*command)
    assert first.returncode == 0, first.stderr
    assert "torch.nn" in heavy  # what the test looks for is there to be found
    again, heavy = _run(*command)
    assert (again.returncode, heavy) == (0, [])
    assert "6 points: 0 to run, 6 done" in again.stderr
    report, heavy = _run("harness.report", str(tmp_path / "default"))
    assert (report.returncode, heavy) == (0, [])


_PACKAGE = {
    "__init__": "print('runs package')\nfrom waiting_package import inside\nVALUE = 1\n",
    "inside": "print('runs inside')\nVALUE = 2\n",
}
_PROGRAMS = {
    "an import alone runs nothing": ("import waiting_package", []),
    "an attribute runs the package": (
        "import waiting_package as package; print(package.VALUE)",
        ["runs package", "runs inside", "1"],
    ),
    "a name from it runs the package": (
        "from waiting_package import VALUE; print(VALUE)",
        ["runs package", "runs inside", "1"],
    ),
    "a module inside runs the package, and once": (
        (
            "import waiting_package\nimport waiting_package.inside as inside\n"
            "print(inside is waiting_package.inside, inside.__spec__.name, type(waiting_package).__name__)"
        ),
        ["runs package", "runs inside", "True waiting_package.inside module"],
    ),
    "a module of a room waits by itself": (
        "from waiting_room import quiet; print('imported'); print(quiet.VALUE)",
        ["imported", "runs quiet", "3"],
    ),
    "what fails fails for the next reader too": (
        (
            "import waiting_room.broken as broken\n"
            "for _ in range(2):\n    try:\n        broken.VALUE\n    except ZeroDivisionError:\n"
            "        print('failed')"
        ),
        ["runs broken", "failed", "runs broken", "failed"],
    ),
    "no such attribute": (
        "import waiting_package as package; print(hasattr(package, 'no'))",
        ["runs package", "runs inside", "False"],
    ),
}


@pytest.mark.parametrize(("program", "printed"), _PROGRAMS.values(), ids=_PROGRAMS)
def test_what_waits_runs_when_it_is_read(tmp_path: Path, program: str, printed: list[str]) -> None:
    sources = {
        **{f"waiting_package/{name}.py": text for name, text in _PACKAGE.items()},
        "waiting_room/__init__.py": "",
        "waiting_room/quiet.py": "print('runs quiet')\nVALUE = 3\n",
        "waiting_room/broken.py": "print('runs broken')\n1 / 0\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    setup = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from harness import deferred\n"
        "deferred.LIBRARIES, deferred.ROOMS = ('waiting_package',), ('waiting_room',)\n"
        "deferred.install(); deferred.install()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", setup + program], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == printed, done.stderr


def test_ranks_and_user_programs_import_at_once() -> None:
    assert not any(type(finder).__module__ == "harness.deferred" for finder in sys.meta_path)
