"""The program as people start it: exit codes, what is printed where, and what a signal leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from harness.command_line import cli, hydra_words
from harness.command_line.plan_help import PLAN_HELP
from harness.ranks.forkserver import ForkServer
from harness.records.step_trace import read_steps
from harness.records.store import Store
from hydra_plugins.acbench.sweeper import ASKED_FOR
from strategies import ac_variants
from tests.forked_servers import forks_of
from tests.harness import command, records_fixture
from tests.harness.command import Finished
from tests.harness.composing import ROOT, composed

ACBENCH = str(Path(sys.executable).with_name("acbench"))
SMALL = [
    "model=mlp",
    "model.n_layers=2",
    "model.width=8",
    "model.hidden_width=8",
    "data=synthetic",
    "batch_size=2",
    "sequence_length=8",
    "mesh.device=cpu",
    "protocol=smoke",
    "protocol.timed_pairs=0",
    "protocol.parity_steps=1",
    "tracker=none",
]
PATIENCE_S = 120.0
"""Longest time for what takes a few seconds on a machine with nothing else to do."""


Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def imported(rank_server: ForkServer) -> Iterator[ForkServer]:
    with forks_of(rank_server):
        server = ForkServer(command.PRELOAD)
    yield server
    server.close()


@pytest.fixture
def acbench(imported: ForkServer, tmp_path: Path) -> Run:
    """Run the program in `tmp_path` to its end; what starts as people start it is `_started`."""
    return lambda *arguments: command.acbench(imported, tmp_path, arguments, _environment())


@pytest.fixture
def acbench_plan(imported: ForkServer, tmp_path: Path) -> Run:
    """Run `acbench-plan` in `tmp_path` to its end."""
    return lambda *words: command.acbench(imported, tmp_path, words, _environment(), "acbench-plan")


def _started(folder: Path, *arguments: str, program: tuple[str, ...] = (ACBENCH,)) -> Finished:
    """Start the program in `folder`, as people do, and wait for its end."""
    done = subprocess.run(
        [*program, *arguments],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    return Finished(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def _environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"} | changes


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["ac=fulll"],
            f"acbench: ac: unknown option 'fulll'; did you mean 'full'? options: {', '.join(ac_variants)}\n",
            id="an option that does not exist",
        ),
        pytest.param(
            ["mesh=ddp2", "batch_size=3"],
            "acbench: batch_size: must be a multiple of the 2 data-parallel ranks of ddp2, got 3\n",
            id="an impossible combination",
        ),
        pytest.param(
            ["sweep=ac_matrix"],
            "acbench: sweep: ac_matrix is a set of points; run it with acbench -m sweep=ac_matrix\n",
            id="a sweep without -m",
        ),
        pytest.param(
            ["ac=null"],
            "acbench: Config group override must be a string or a list. Got NoneType\n",
            id="a group of nothing",
        ),
        pytest.param(
            ["-m", "ac=none,full", "name=a,b"],
            "acbench: name: belongs to the whole sweep and cannot be swept; give it one value\n",
            id="a sweep in two folders",
        ),
        pytest.param(
            ["-m", "ac=full,selective_layer", "ac.earlystop=false"],
            "acbench: ac.earlystop: ac=full has no such option; did you mean 'early_stop'? options: "
            "early_stop, layers_fqn, module_classes, offload, preserve_rng_state, rewind, split_backward, "
            "use_reentrant\n",
            id="a typo in a sweep",
        ),
        pytest.param(
            ["model=mlp", "-m", "ac=none,full", "model.n_layer=3"],
            "acbench: model.n_layer: model=mlp has no such option; did you mean 'n_layers'? options: "
            "dropout, hidden_width, layers_fqn, n_layers, vocab_size, width\n",
            id="a typo that no choice of the sweep excuses",
        ),
        pytest.param(
            ["ac=none", "show=regions"],
            "acbench: show: ac=none, chunk=none, shard=none have no view 'regions'; they have none; views "
            "are chunks of chunk=budget, chunk=minimum, chunk=tiles; file of ac=budget, ac=full, ac=offload, "
            "ac=selective_layer, ac=selective_op; memory of chunk=budget, chunk=minimum, chunk=tiles; plan "
            "of ac=budget; regions of ac=nested; torch_remat of ac=budget\n",
            id="a view of what has none",
        ),
        pytest.param(
            ["ac=nested", "show=region"],
            "acbench: show: ac=nested, chunk=none, shard=none have no view 'region'; views: regions\n",
            id="a view that does not exist",
        ),
        pytest.param(["help"], "acbench: 'help': is no option; write --help\n", id="help without dashes"),
        pytest.param(
            ["full"],
            "acbench: 'full': is no option; write group=choice, group.option=value or name=value\n",
            id="a choice without its group",
        ),
        pytest.param(
            ["--dryrun"], "acbench: --dryrun: is no flag; did you mean --dry-run?\n", id="a flag with a typo"
        ),
        pytest.param(
            ["ac=full,none"],
            "acbench: ac=full,none: several values are a sweep; add -m\n",
            id="several values without -m",
        ),
        pytest.param(
            ["model=python", "model.factory=mine.py:make"],
            "acbench: model.factory: cannot import 'mine.py': No module named 'mine'; a module has no ending "
            "and no folders: write mine:make\n",
            id="a file for a module",
        ),
        pytest.param(
            ["-m", "ac=budget", "mesh=single,ddp2"],
            "acbench: ac: give exactly one of ac.budget_gib, ac.fraction, ac.plan_file, got none of them\n",
            id="a sweep of points that are no experiments",
        ),
        pytest.param(
            ["show=3"],
            "acbench: show: must be the name of a view or null, got 3\n",
            id="a number for a view",
        ),
    ],
)
def test_a_refused_command_says_why_and_leaves_nothing(
    acbench: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = acbench(*arguments)
    assert (done.code, done.stdout, done.stderr) == (2, "", message)
    assert _files(tmp_path) == []


REGIONS = """\
embedding
region 0
    layers.0
region 1
    layers.1
head

# forward of the model
def forward(self, tokens_BS):
    def checkpoint_0(self, embedding):
        layers_0 = self.layers[0](embedding)  # float32 (2, 8, 8)
        return layers_0

    def checkpoint_1(self, layers_0):
        layers_1 = self.layers[1](layers_0)  # float32 (2, 8, 8)
        return layers_1

    embedding = self.embedding(tokens_BS)  # float32 (2, 8, 8)
    layers_0 = torch.utils.checkpoint.checkpoint(self.checkpoint_0, embedding, use_reentrant=False)  # float32 (2, 8, 8)
    layers_1 = torch.utils.checkpoint.checkpoint(self.checkpoint_1, layers_0, use_reentrant=False)  # float32 (2, 8, 8)
    head = self.head(layers_1)  # float32 (2, 8, 256)
    return (head,)
"""  # noqa: E501 (as it is printed)


def test_what_a_strategy_decides_is_shown_and_nothing_runs(acbench: Run, tmp_path: Path) -> None:
    done = acbench(*SMALL, "ac=nested", "ac.levels=[2]", "show=regions")
    assert (done.code, done.stdout, done.stderr) == (0, REGIONS, "")
    assert _files(tmp_path) == []


def test_a_sweep_shows_every_point(acbench: Run, tmp_path: Path) -> None:
    done = acbench("-m", *SMALL, "ac=nested", "ac.levels=[1],[2]", "show=regions")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.count("# forward of the model") == 2
    assert done.stdout.endswith(REGIONS)
    assert _files(tmp_path) == []


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """One sweep of six points, four of them distinct, two of those refused."""

    folder: Path
    first: Finished
    again: Finished
    mtimes_ns: dict[Path, int]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("sweep")
    words = ["-m", *SMALL, "ac=none,full,full", "seed=0,-1", "name=nice"]
    first = _started(folder, *words)
    mtimes_ns = {path: path.stat().st_mtime_ns for path in folder.glob("outputs/nice/*/record.json")}
    again = _started(folder, *words, "strict=true", program=(sys.executable, "-m", "harness"))
    return Swept(
        folder=folder,
        first=first,
        again=again,
        mtimes_ns=mtimes_ns,
    )


def test_a_dry_run_says_what_would_run_and_leaves_nothing(acbench: Run, tmp_path: Path) -> None:
    done = acbench("--dry-run", "-m", *SMALL, "ac=none,full", "seed=0,-1")
    lines = done.stdout.splitlines()
    assert (done.code, done.stderr) == (0, "")
    assert [" ".join(line.split()[1:]) for line in lines[:-1]] == [
        "to run none seed=0 on single, mlp",
        "refused none seed=-1 on single, mlp: seed: must be at least 0, got -1",
        "to run full seed=0 on single, mlp",
        "refused full seed=-1 on single, mlp: seed: must be at least 0, got -1",
    ]
    assert lines[-1] == "4 points: 2 to run, 2 refused; nothing has run"
    assert acbench("--dry-run", *SMALL).stdout.endswith("1 point: 1 to run; nothing has run\n")
    assert _files(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["hardware=h10"], "hardware: unknown option 'h10'; did you mean 'h100'?", id="hardware"),
        pytest.param(
            ["mesh.dp_shard=3"],
            "batch_size: must be a multiple of the 3 data-parallel ranks of shard3, got 2",
            id="mesh larger than the batch",
        ),
        pytest.param(["solve=seed"], "solve: 'seed' cannot be solved for; options: batch_size", id="field"),
        pytest.param(["solve=batch_size"], "solve: needs a memory to fit; name one", id="no memory"),
        pytest.param(
            ["-m", "hardware.usable_gib=9"], "hardware: must be named before its numbers", id="no name"
        ),
        pytest.param(["hardware=h100", "hardware.usable_gib=0"], "hardware.usable_gib: must be", id="number"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(acbench_plan: Run, words: list[str], message: str) -> None:
    done = acbench_plan(*[word for word in words if word == "-m"], *SMALL, *[w for w in words if w != "-m"])
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"acbench-plan: {message}")


def test_solving_is_for_plans(acbench: Run) -> None:
    done = acbench(*SMALL, "solve=batch_size", "hardware=h100")
    assert done.stderr == "acbench: solve: is for acbench-plan; use that command, or leave it out\n"


def test_a_plan_predicts_and_leaves_nothing(acbench_plan: Run, tmp_path: Path) -> None:
    words = ("-m", *SMALL, "ac=none,full", "seed=0,-1", "mesh.dp_shard=2", "hardware=h100", "--json")
    done = acbench_plan(*words, "hardware.usable_gib=1e-5")
    rows = json.loads(done.stdout)
    assert done.code == 1
    assert [(row["status"], row["fits"], row["state"]) for row in rows] == [
        ("predicted", False, "to run"),
        ("refused", None, "refused"),
    ] * 2
    assert rows[0]["time"]["step_time_s"]["median"] > 0
    assert rows[0]["bound_by"] == "host"  # launches take longer than operators of this size
    assert done.stderr.splitlines()[-1].startswith("[2/2] ")
    assert _files(tmp_path) == []


def test_predicted_steps_are_kept_where_no_trial_ran(acbench_plan: Run, tmp_path: Path) -> None:
    done = acbench_plan("-m", *SMALL, "ac=none,full", "name=kept", "--trace")
    assert (done.code, done.stderr.splitlines()[-1]) == (0, "acbench-plan: steps are kept in outputs/kept")
    store = Store(tmp_path / "outputs" / "kept")
    for record in store.scan().records:
        (step,) = read_steps(store.trial_dir(record.trial_id))
        assert record.status == "predicted"
        assert record.memory is not None
        assert record.memory.peak_bytes == max(step.totals())
        assert record.memory.largest_at_peak
    assert len(store.scan().records) == 2
    Store(tmp_path / "outputs" / "ran").write(records_fixture.record())
    done = acbench_plan(*SMALL, "name=ran", "--trace")
    problem = "'outputs/ran' has records of trials that ran, and predictions would stand among them"
    assert (done.code, done.stderr) == (
        2,
        f"acbench-plan: name: {problem}; choose another name for --trace\n",
    )


def test_a_glob_of_a_plan_on_hardware_means_a_budget_of_what_is_usable_too(acbench_plan: Run) -> None:
    done = acbench_plan("-m", *SMALL, "ac=glob(*)", "hardware=h100", "hardware.usable_gib=0.5", "--json")
    left_out = [name for name in ASKED_FOR if name != "budget"]
    assert f"ac: the glob leaves out {', '.join(left_out)}, which need options" in done.stderr
    options = {row["experiment"]["ac"]["name"]: row["experiment"]["ac"] for row in json.loads(done.stdout)}
    assert set(options) == set(ac_variants) - {*left_out}
    assert (done.code, options["budget"]["budget_gib"]) == (0, 0.5)


def test_the_version_is_ours(acbench: Run) -> None:
    assert acbench("--version").stdout == f"acbench {version('acbench')}\n"


def test_help_says_what_every_option_is(acbench: Run) -> None:
    text = acbench("--help").stdout
    said = {line.split()[0] for line in text.partition("== Defaults ==")[0].splitlines() if line.strip()}
    config = composed([])
    assert {str(name) for name in config if name != "hydra"} - said == set()


def test_help_of_a_plan_is_its_own(acbench_plan: Run) -> None:
    done = acbench_plan("--help")
    assert (done.code, done.stdout) == (0, PLAN_HELP)


def test_a_sweep_prints_its_table_on_stdout_and_nothing_else(swept: Swept) -> None:
    assert swept.first.code == 0, swept.first.stderr
    lines = [line.split() for line in swept.first.stdout.splitlines() if line.strip()]
    first = next(number for number, line in enumerate(lines) if line[0] == "variant")
    assert lines[first][:5] == ["variant", "mesh", "status", "verdict", "saved"]
    rows = [
        [cell for cell in line if cell in {"none", "full", "ok", "refused", "neutral"}]
        for line in lines[first + 2 : first + 6]
    ]
    assert rows == [
        ["none", "ok", "neutral"],
        ["none", "refused"],
        ["full", "ok", "neutral"],
        ["full", "refused"],
    ]
    assert "seed: must be at least 0, got -1" in swept.first.stdout


def test_progress_and_paths_are_on_stderr(swept: Swept) -> None:
    lines = swept.first.stderr.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [
        "6",
        *(f"[{number}/4]" for number in (1, 2, 3, 3, 4, 4)),
        "records:",
    ]
    assert lines[0] == "6 points: 2 to run, 0 done, 2 refused, 2 duplicates; shapes 1x1: 2"
    assert lines[-1] == "records: outputs/nice"


def test_every_distinct_point_has_a_record(swept: Swept) -> None:
    records = [json.loads(path.read_text("utf-8")) for path in swept.mtimes_ns]
    assert sorted(record["status"] for record in records) == ["ok", "ok", "refused", "refused"]
    assert {record["name"] for record in records} == {"nice"}


def test_the_same_command_again_runs_nothing(swept: Swept) -> None:
    assert {path: path.stat().st_mtime_ns for path in swept.mtimes_ns} == swept.mtimes_ns
    assert swept.again.stderr.startswith("6 points: 0 to run, 2 done, 2 refused, 2 duplicates\n")
    assert swept.again.stdout == swept.first.stdout


def test_strict_makes_a_refusal_a_failure(swept: Swept) -> None:
    assert (swept.first.code, swept.again.code) == (0, 1)


def test_one_trial_in_another_folder_that_fails(acbench: Run, tmp_path: Path) -> None:
    user = "model=python", "model.factory=tests.harness.user_models:raises", "model.layers_fqn=layers"
    small = [override for override in SMALL if not override.startswith("model")]
    done = acbench(*user, *small, "outputs_dir=else where", "name='önë'", "data=text")
    (path,) = (tmp_path / "else where" / "önë").glob("*/record.json")
    record = json.loads(path.read_text("utf-8"))
    assert (done.code, record["status"], record["error"]["kind"]) == (1, "failed", "ValueError")
    assert "ValueError on rank 0 during instrument: the width is odd" in done.stdout


def test_an_option_goes_to_the_choices_that_have_it(acbench: Run, tmp_path: Path) -> None:
    done = acbench(*SMALL, "-m", "ac=none,full,selective_layer", "ac.early_stop=false,true")
    assert done.code == 0, done.stderr
    records = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob("outputs/*/*/record.json")]
    found = sorted(
        (record["experiment"]["ac"]["name"], record["experiment"]["ac"].get("early_stop"), record["status"])
        for record in records
    )
    assert found == [
        ("full", False, "ok"),
        ("full", True, "ok"),
        ("none", None, "ok"),
        ("selective_layer", False, "ok"),
        ("selective_layer", True, "ok"),
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(
            ["ac=glob(compiler*)", "compile=aot_eager"], 0, "1 to run", id="what is asked for alone"
        ),
        pytest.param(
            ["ac=glob(*)"],
            0,
            "ac: the glob leaves out accelerate, budget, compiler_budget, deepspeed, fairscale, file, "
            "megatron, modules, python, torch_remat, torchtitan, transformers, trl, which need options, "
            "a compiler, code of yours or a package: ask for them by name\n",
            id="what is left out is said",
        ),
        pytest.param(
            ["ac=glob(x*)"],
            2,
            "acbench: ac: glob(x*) matches none of accelerate, budget, compiler_budget, ",
            id="nothing",
        ),
        pytest.param(
            ["seed=glob(*)"],
            2,
            "acbench: seed: glob(*) matches nothing, because it is no group; give values by name\n",
            id="no group",
        ),
    ],
)
def test_a_glob_sweeps_something_or_is_refused(acbench: Run, words: list[str], code: int, said: str) -> None:
    done = acbench(*SMALL, "--dry-run", "-m", *words)
    assert done.code == code
    assert said in done.stdout + done.stderr


def test_none_has_no_option_that_nobody_has(acbench: Run) -> None:
    done = acbench(*SMALL, "-m", "ac=none,full", "ac.earlystop=false")
    assert (done.code, done.stderr) == (
        2,
        "acbench: ac.earlystop: ac=none has no such option; there are no options\n",
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("ac=full ac.offload=true", "ac=full ac.offload=true", id="one trial as it is"),
        pytest.param(
            "model=python model.kwargs.width=2 model.overrides.n_layer=1 model.name=x",
            "model=python ++model.kwargs.width=2 ++model.overrides.n_layer=1 model.name=x",
            id="an argument of a factory is added to those there are",
        ),
        pytest.param("model=mlp -m ac=none,full", "--multirun model=mlp ac=none,full", id="the flag first"),
        pytest.param("--multirun ac=full", "--multirun ac=full", id="the long flag"),
        pytest.param(
            "-m ac=full,none ac.x=[a,b] mesh.tp=1,2 seed=0",
            "--multirun ac=full,none ++ac.x=[a,b] ++mesh.tp=1,2 seed=0",
            id="options of groups are added where missing",
        ),
        pytest.param(
            "-m hydra.verbose=true +ac.x=1 ++ac.x=1 ~ac.x hydra/launcher=local data=x.y",
            "--multirun hydra.verbose=true +ac.x=1 ++ac.x=1 ~ac.x hydra/launcher=local data=x.y",
            id="and nothing else",
        ),
    ],
)
def test_words_as_hydra_takes_them(words: str, expected: str) -> None:
    assert hydra_words.words_for_hydra(words.split()) == expected.split()


def test_two_commands_on_one_sweep_run_every_trial_once(imported: ForkServer, tmp_path: Path) -> None:
    words = ("-m", *SMALL, "ac=none,full")
    one, other = command.at_once(imported, tmp_path, [words, words], _environment())
    assert (one.code, other.code) == (0, 0), (one.stderr, other.stderr)
    assert one.stdout == other.stdout
    lines = (one.stderr + other.stderr).splitlines()
    assert sum(line.endswith(" ...") and "waiting" not in line for line in lines) == 2  # trials that started
    plans = [line for line in lines if line.startswith("2 points: ")]
    assert "2 points: 2 to run, 0 done, 0 duplicates; shapes 1x1: 2" in plans
    records = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob("outputs/*/*/record.json")]
    assert [record["status"] for record in records] == ["ok"] * 2


def test_refuses_outputs_that_cannot_be_written(acbench: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = acbench(*SMALL, "outputs_dir=file")
    assert (done.code, done.stdout, done.stderr) == (
        2,
        "",
        "acbench: outputs_dir: cannot write 'file/default': Not a directory\n",
    )


Sent = Callable[[subprocess.Popen[str]], None]


def _ctrl_c_twice(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    while "Ctrl-C again" not in process.stderr.readline():
        pass
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "code", "said"),
    [
        pytest.param(
            _ctrl_c_twice,
            1,
            "acbench: interrupted; finished trials are kept, the same command continues\n",
            id="Ctrl-C twice",
        ),
        pytest.param(lambda process: process.terminate(), 143, "", id="SIGTERM"),
        # by default tests/harness/ranks/test_agent.py has it, of a driver without a sweep
        pytest.param(lambda process: process.kill(), -9, "", id="SIGKILL", marks=pytest.mark.matrix),
    ],
)
def test_a_signal_ends_the_sweep_keeps_what_is_finished_and_leaves_no_process(
    tmp_path: Path, send: Sent, code: int, said: str
) -> None:
    with _hanging(tmp_path) as (process, mark):
        send(process)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code
        assert stderr.endswith(said)
        assert "Traceback" not in stderr
        _until(lambda: not _marked(mark), "no process is left")
    (record,) = (json.loads(path.read_text("utf-8")) for path in tmp_path.glob("outputs/*/*/record.json"))
    assert record["status"] == "ok"
    assert record["experiment"]["model"]["factory"].endswith(":healthy")


@pytest.mark.slow
def test_one_ctrl_c_lets_the_running_point_end_and_starts_no_other(tmp_path: Path) -> None:
    with _hanging(tmp_path, "protocol.deadline_s=30") as (process, mark):
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        _until(lambda: not _marked(mark), "no process is left")
    assert "acbench: stopping after the running points; Ctrl-C again stops at once\n" in stderr
    assert "acbench: 1 without a record yet; the same command continues\n" in stderr
    records = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob("outputs/*/*/record.json")]
    assert sorted(record["status"] for record in records) == ["ok", "timeout"]
    assert "no result within 30 s" in stdout


@contextlib.contextmanager
def _hanging(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a sweep of three points and wait until the second, which hangs on two ranks, is under way."""
    mark = uuid.uuid4().hex
    factories = ",".join(f"tests.harness.user_models:{name}" for name in ("healthy", "hangs", "raises"))
    small = [override for override in SMALL if not override.startswith("model")]
    process = subprocess.Popen(
        [ACBENCH, "-m", "model=python", f"model.factory={factories}", *small, "mesh=ddp2", *options],
        cwd=folder,
        env=_environment(ACBENCH_TEST_MARK=mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _until(lambda: _is_hanging(folder), "the second point is under way")
        assert len(_marked(mark)) >= 3  # the driver and two ranks
        yield process, mark
    finally:
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _is_hanging(folder: Path) -> bool:
    """Whether both ranks of a trial without a record have reached their first forward."""
    trials = [path.parent for path in folder.glob("outputs/*/*/experiment.yaml")]
    reports = [
        json.loads(path.read_text("utf-8"))
        for trial in trials
        if not (trial / "record.json").exists()
        for path in trial.glob("rank*.json")
    ]
    return len(trials) == 2 and [report["phase"] for report in reports] == ["instrument", "instrument"]


def _marked(mark: str) -> list[int]:
    """Return the processes that inherited the mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if f"ACBENCH_TEST_MARK={mark}".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE_S} s for: {what}"
        time.sleep(0.05)


@pytest.mark.parametrize("loaded", [False, True], ids=["without triton", "with triton"])
def test_the_last_collections_are_spared_unless_triton_counts_on_them(
    monkeypatch: pytest.MonkeyPatch, *, loaded: bool
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", ModuleType("libtriton"))
    cli._hasten_exit()
    assert frozen == [True] * (not loaded)
