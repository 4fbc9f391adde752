"""The commands answer without torch, and what waits is an ordinary module for whoever reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
SWEEP = (
    "-m",
    "model=mlp",
    "ac=full,nested",
    "mesh.device=cpu",
    "protocol=smoke",
    "protocol.timed_pairs=0",
    "protocol.parity_steps=1",
    "tracker=none",
    "data=synthetic",
    "batch_size=2",
    "sequence_length=8",
    "model.n_layers=2",
    "model.width=16",
    "model.hidden_width=32",
)
_OURS = (f"{ROOT}/harness/", f"{ROOT}/strategies/")
_WITNESS = f"""
import itertools, re, runpy, sys, traceback

readers = {{}}

class Witness:
    def find_spec(self, name, path, target=None):
        if re.fullmatch(r"torch\\._C|torch\\.nn|scipy|transformers|submitit|wandb", name):
            ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith({_OURS!r})]
            before = itertools.takewhile(lambda frame: not frame.filename.endswith("/deferred.py"), ours)
            readers[name] = [f"{{frame.filename}}:{{frame.lineno}}" for frame in before][-1]

sys.meta_path.insert(0, Witness())

def run(*words):
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        for name in readers.keys() & sys.modules.keys():
            print("heavy import:", name, "by", readers[name], file=sys.stderr)
"""
_ONE = f"{_WITNESS}\nrun(*sys.argv[1:])\n"
_EACH_IN_A_FORK = f"""{_WITNESS}
import json, os, pathlib

from harness import deferred

deferred.install()
import harness.command_line.cli  # once for all forks

def be(words, said):
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    try:
        run(*words)
        code = 0
    except SystemExit as ended:
        code = ended.code
    sys.stderr.flush()
    os._exit(code)

ended = []
for number, words in enumerate(json.loads(sys.argv[1])):
    said = pathlib.Path(sys.argv[2], str(number))
    child = os.fork() or be(words, said)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended.append([code, said.read_text("utf-8")])
print(json.dumps(ended))
"""
REFUSALS = {
    "unknown choice": ("ac=ful", "ac: unknown option 'ful'"),
    "unknown option": ("+ac.freq=2", "ac.freq"),
    "wrong type": ("seed=x", "seed: must be an integer, got 'x'"),
    "out of range": ("ac=selective_layer ac.ac_freq=0", "ac.ac_freq: must be at least 1, got 0"),
    "no such operator group": ("ac=selective_op ac.save_ops=none", "'none' is no preset"),
    "impossible combination": ("wrap_order=outside_fsdp", "wrap_order: outside_fsdp needs FSDP"),
    "indivisible size": ("mesh.tp=3 mesh.device=cpu", "mesh.tp: must divide model.hidden_width"),
}


_MARK = "heavy import: "


def _run(*words: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a module as a command; return how it ended and its heavy imports, each with who read first."""
    done = subprocess.run(
        [sys.executable, "-c", _ONE, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done, [line.removeprefix(_MARK) for line in done.stderr.splitlines() if line.startswith(_MARK)]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and stderr of each refused command, in forks of one process that has imported the driver."""
    commands = [["harness", "model=mlp", *words.split()] for words, _ in REFUSALS.values()]
    folder = str(tmp_path_factory.mktemp("refused"))
    done = subprocess.run(
        [sys.executable, "-c", _EACH_IN_A_FORK, json.dumps(commands), folder],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {
        words: (code, said)
        for (words, _), (code, said) in zip(REFUSALS.values(), json.loads(done.stdout), strict=True)
    }


def test_help_needs_no_torch() -> None:
    said = []
    for module in ("harness", "acbench"):
        done, heavy = _run(module, "--help")
        assert (done.returncode, heavy) == (0, []), module
        said.append(done.stdout)
    assert said[0] == said[1]


@pytest.mark.parametrize(("words", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_by_the_configuration_needs_no_torch(
    refused: dict[str, tuple[int, str]], words: str, message: str
) -> None:
    code, said = refused[words]
    assert code == 2
    assert _MARK not in said
    assert message in said


def test_the_driver_of_a_sweep_needs_no_torch(tmp_path: Path) -> None:
    command = ("harness", *SWEEP, f"outputs_dir={tmp_path}")
    first, heavy = _run(*command)  # its checks and its trials are where the fork server has imported torch
    assert (first.returncode, heavy) == (0, []), first.stderr
    again, heavy = _run(*command)
    assert (again.returncode, heavy) == (0, [])
    assert "2 points: 0 to run, 2 done" in again.stderr


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
    "what fails leaves nothing, and fails in the same way for the next reader": (
        (
            "import waiting_room.broken as broken\nerrors = []\n"
            "for name in ('VALUE', 'HALF'):\n    try:\n        getattr(broken, name, 0)\n"
            "    except ZeroDivisionError as error:\n        errors.append(error)\n"
            "print(len(errors), errors[0] is errors[-1])"
        ),
        ["runs broken", "2 True"],
    ),
    "no such attribute": (
        "import waiting_package as package; print(hasattr(package, 'no'))",
        ["runs package", "runs inside", "False"],
    ),
    "no such attribute while it runs is no answer": (
        (
            "import waiting_room.typo as typo\n"
            "for ask in (hasattr, lambda *which: getattr(*which, 0)):\n"
            "    try:\n        print(ask(typo, 'VALUE'))\n"
            "    except ImportError as error:\n        print(error, type(error.__cause__).__name__)"
        ),
        ["waiting_room.typo: module 'sys' has no attribute 'no' AttributeError"] * 2,
    ),
    "a module that reads itself while it runs": (
        "import waiting_room.circle as circle; print(circle.SEEN, type(circle).__name__)",
        ["[True, False] module"],
    ),
    "what is set stays": (
        "from waiting_room import quiet; quiet.VALUE = 9; print(quiet.VALUE)",
        ["runs quiet", "9"],
    ),
    "what is deleted was there": (
        "from waiting_room import quiet; del quiet.VALUE; print(hasattr(quiet, 'VALUE'))",
        ["runs quiet", "False"],
    ),
    "a list of names is whole": (
        "from waiting_room import quiet; print('VALUE' in dir(quiet), '__waiting__' in dir(quiet))",
        ["runs quiet", "True False"],
    ),
    "threads wait for the one that runs it": (
        (
            "from concurrent.futures import ThreadPoolExecutor\nfrom waiting_room import slow\n"
            "with ThreadPoolExecutor(3) as pool:\n"
            "    print([ask.result() for ask in [pool.submit(lambda: slow.VALUE) for _ in range(3)]])"
        ),
        ["runs slow", "[4, 4, 4]"],
    ),
    "a module inside may wait in a package that has run": (
        (
            "import waiting_room.nest.egg as egg; print('imported'); print(egg.VALUE)\n"
            "print(egg.__spec__.name, type(egg.__loader__).__name__)"
        ),
        ["runs nest", "imported", "runs egg", "6", "waiting_room.nest.egg SourceFileLoader"],
    ),
    "a reload runs again": (
        (
            "import importlib, ordinary, waiting_package.inside as inside\n"
            "for module in (ordinary, inside):\n"
            "    print(importlib.reload(module) is module, type(module.__loader__).__name__)"
        ),
        [
            *("runs ordinary", "runs package", "runs inside"),
            *("runs ordinary", "True SourceFileLoader", "runs inside", "True SourceFileLoader"),
        ],
    ),
}


@pytest.mark.parametrize(("program", "printed"), _PROGRAMS.values(), ids=_PROGRAMS)
def test_what_waits_runs_when_it_is_read(tmp_path: Path, program: str, printed: list[str]) -> None:
    sources = {
        **{f"waiting_package/{name}.py": text for name, text in _PACKAGE.items()},
        "ordinary.py": "print('runs ordinary')\n",
        "waiting_room/__init__.py": "",
        "waiting_room/quiet.py": "print('runs quiet')\nVALUE = 3\n",
        "waiting_room/broken.py": "print('runs broken')\nHALF = 1\n1 / 0\n",
        "waiting_room/typo.py": "import sys\nsys.no\n",
        "waiting_room/circle.py": (
            "from waiting_room import circle\nFIRST = 1\n"
            "SEEN = [hasattr(circle, name) for name in ('FIRST', 'LAST')]\nLAST = 2\n"
        ),
        "waiting_room/slow.py": "import time\nprint('runs slow')\ntime.sleep(0.3)\nVALUE = 4\n",
        "waiting_room/nest/__init__.py": "print('runs nest')\nimport waiting_room.nest.egg\n",
        "waiting_room/nest/egg.py": "print('runs egg')\nVALUE = 6\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, "utf-8")
    setup = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from harness import deferred\n"
        "deferred.LIBRARIES, deferred.ROOMS = ('waiting_package',), ('waiting_room',)\n"
        "deferred.install(); deferred.install()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", setup + program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines() == printed, done.stderr


def _finders(_rank: int = 0) -> list[str]:
    return [finder.__module__ for finder in sys.meta_path]


def test_a_user_program_imports_at_once() -> None:
    """This process is one: it has imported nearly all of us, and never `harness.deferred.install`."""
    assert "_frozen_importlib_external" in _finders()
    assert "harness.deferred" not in _finders()


def test_a_rank_imports_at_once(pool2: RankPool) -> None:
    for finders in pool2.run(_finders):
        assert "_frozen_importlib_external" in finders
        assert "harness.deferred" not in finders
