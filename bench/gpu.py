"""What a machine with a GPU is asked, in stages, the most valuable first: `make gpu`.

A stage is a few commands, each with a limit of time. Everything they leave goes into three files, written as
it comes: `summary.json` (what ended how, after how long), `log.txt` (all that was printed) and `results.tgz`
(JSON of benchmarks, records and logs of sweeps). A command that fails or is cut short keeps no other from
running. `--rehearse` runs every command on the CPU, with tiny sizes.

This module, and what it imports, needs nothing but Python: the packages that the machine lacks come as
wheels, which it unpacks.

    python3 -m bench.gpu tests parity
    python3 -m bench.gpu --rehearse
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.ranks.agent import sigterm_exits
from harness.records.files import SHARED, write_atomically

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".whl"
IN_PROCESS_TESTS = (
    "tests/gpu/test_copies.py",
    "tests/harness/measure/memory/test_allocator.py",
    "tests/harness/measure/parity/test_snapshot.py",
    "tests/harness/measure/speed/test_peak_rates.py",
    "tests/harness/measure/speed/test_timing.py",
    "tests/strategies/ac/test_offload.py",
)
RANK_TESTS = ("tests/gpu/test_trials.py", "tests/gpu/test_sharded.py", "tests/gpu/test_context.py")
REHEARSAL = "ACBENCH_GPU_REHEARSAL"
"""The environment variable that lets tests of the GPU run on the CPU (tests/gpu/devices.py)."""

_GRACE_S = 10.0
_REHEARSAL_PATIENCE = 5.0
_PACK_EVERY_S = 30.0
_LARGEST_KEPT_BYTES = 8 * 1024 * 1024
_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Words for the machine's python3.

    Fields:
        name: unique; `{results}/<name>` is where it leaves what it finds.
        words: the command line; `{device}`, `{name}` and `{results}` are filled in, and `gpu` or `cpu` for
            `{size}`.
        limit_s: longest time in seconds.
        gpu, cpu: sizes there, and in a rehearsal.
    """

    name: str
    words: str
    limit_s: int
    gpu: str = ""
    cpu: str = ""

    def line(self, *, device: str, results: Path) -> list[str]:
        """Return the words for `device`, `cuda` or `cpu`, with results below a folder."""
        sizes = self.gpu if device == "cuda" else self.cpu
        filled = self.words.replace("{size}", sizes)
        return [
            word.format(device=device, name=self.name, results=results.as_posix())
            for word in shlex.split(filled)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A question, and the commands that answer it."""

    question: str
    commands: tuple[Command, ...]

    @property
    def limit_s(self) -> int:
        """Longest time of all commands together, in seconds."""
        return sum(command.limit_s for command in self.commands)


def _tests(name: str, files: Sequence[str], limit_s: int) -> Command:
    # no option of pyproject.toml: an older pytest refuses those that it does not know, and no warning of
    # the machine's packages is an error of ours
    options = "-o addopts= -W default --import-mode=importlib -p no:cacheprovider -q -ra --durations=10"
    return Command(
        name=name,
        words=f"-m pytest -m gpu {options} --junitxml {{results}}/{{name}}.xml {' '.join(files)}",
        limit_s=limit_s,
    )


def _proof(name: str, limit_s: int, *, file: str = "", gpu: str = "", cpu: str = "") -> Command:
    tests = _tests(name, [f"tests/matrix/test_{file or name}.py"], limit_s)
    words = f"{tests.words.replace('-m gpu ', '')} --fresh --device {{device}} {{size}}"
    return Command(name=name, words=words, limit_s=limit_s, gpu=gpu, cpu=cpu)


def _sweep(name: str, points: str, limit_s: int, *, gpu: str = "", cpu: str = "") -> Command:
    shared = "name={name} outputs_dir={results} tracker=none mesh=single mesh.device={device} data=synthetic"
    words = f"-m harness -m {shared} {points} {{size}}"
    return Command(name=name, words=words, limit_s=limit_s, gpu=gpu, cpu=cpu)


_CHUNKED = "strict=true protocol=parity chunk=none,budget"
_TINY = "batch_size=2 model.n_layers=2 protocol.parity_steps=1"
STAGES: Mapping[str, Stage] = {
    "tests": Stage(
        question="Do copies, clocks, meters, every variant, and FSDP over NCCL work on CUDA at all?",
        commands=(
            _tests("tests_in_process", IN_PROCESS_TESTS, 90),
            _tests("tests_trials", RANK_TESTS[:1], 200),
            _tests("tests_sharded", RANK_TESTS[1:], 140),
        ),
    ),
    "parity": Stage(
        question="Is every variant bitwise neutral on CUDA, and is every silent defect found?",
        commands=(
            _proof("parity", 140, gpu="-k single", cpu="-k single-mlp"),
            _proof("detection", 50),
        ),
    ),
    "models": Stage(
        question="Do chunks keep their budget on CUDA, for a GPT, a ViT and an Evoformer, and torchtitan's "
        "preset its promise?",
        commands=(
            _sweep(
                "chunks",
                f"{_CHUNKED} model=gpt_nano,vit_nano",
                100,
                gpu="chunk.fraction=0.5,0.25",
                cpu=f"chunk.fraction=0.9 {_TINY}",
            ),
            _sweep(
                "chunks_evoformer",
                f"{_CHUNKED} model=evoformer",
                150,
                gpu="chunk.fraction=0.5",
                cpu=f"chunk.fraction=0.9 model.msa_width=32 model.pair_width=16 model.n_residues=8 {_TINY}",
            ),
            _sweep(
                "torchtitan",
                "strict=true protocol=parity model=llama_nano ac=none,selective_op ac.save_ops=torchtitan",
                50,
                cpu=f"sequence_length=8 {_TINY}",
            ),
        ),
    ),
    "sweep": Stage(
        question="What does each variant save, and what does it cost in time; does offloading overlap?",
        commands=(
            _sweep(
                "sweep",
                "strict=true 'ac=glob(*)' dtype=bf16_mixed",
                280,
                gpu="model=gpt_small batch_size=16 sequence_length=1024 protocol=standard",
                cpu=f"model=gpt_nano protocol=smoke protocol.timed_pairs=2 sequence_length=8 {_TINY}",
            ),
        ),
    ),
    "memory": Stage(
        question="Is a trial that runs out of memory a record that names phase and rank, and what saves it?",
        commands=(
            _sweep(
                "out_of_memory",
                "protocol=smoke ac=none,full",
                140,
                gpu="model=llama_1b dtype=bf16_mixed batch_size=16 sequence_length=4096",
                cpu="model=python model.factory=tests.matrix.faults.models:oom",
            ),
        ),
    ),
    "exactness": Stage(
        question="Do live storages and the caching allocator agree to the byte?",
        commands=tuple(
            _proof(
                f"exactness_{model}",
                limit_s,
                file="exactness",
                gpu=f"-k '{model} and not tokens'",
                cpu=f"-k '{model} and not tokens'",
            )
            for model, limit_s in (("gpt_nano", 50), ("llama_nano", 50), ("moe_nano", 75), ("mlp", 40))
        ),
    ),
    "instrumentation": Stage(
        question="What do the timed steps of a trial add to a bare training loop?",
        commands=(
            Command(
                name="steps",
                words="-m bench.overhead --part steps --device {device} --out {results}/{name}.json {size}",
                limit_s=90,
                gpu="--model gpt_small --sequence-length 512 --pairs 40",
                cpu="--batch-size 2 --sequence-length 8 --pairs 2",
            ),
        ),
    ),
}
"""What is asked, by name, in the order of value."""

CALLS = (("tests",), ("parity", "models"), ("sweep", "memory"), ("exactness", "instrumentation"))
"""The stages in four calls of less than ten minutes each, for a machine that is lent by the minute."""

MACHINE = Command(name="machine", words="-m bench.gpu_machine --device {device}", limit_s=60)
"""Goes before everything else: what the machine has; without it no stage can work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a command ended.

    Fields:
        status: `ok`, `failed`, `timeout`, or `skipped` where no time was left for it.
        code: its exit status; `None` where it did not run to its end.
        wall_s: seconds that it took.
    """

    name: str
    stage: str
    line: str
    status: str
    code: int | None
    wall_s: float
    limit_s: float


class Report:
    """The three files of a run.

    Args:
        out: their folder, made when missing; what lies there under their names is replaced.
        results: folder of what commands leave, outside of `out`.
    """

    def __init__(self, out: Path, results: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / "log.txt"
        self.log.write_bytes(b"")
        self.endings: list[Ending] = []
        self._summary = out / "summary.json"
        self._archive = out / "results.tgz"
        self._results = results
        self.pack()

    def pack(self) -> None:
        """Write the summary and the archive anew, each in one stroke."""
        summary = {"python": sys.version, "commands": [asdict(ending) for ending in self.endings]}
        write_atomically(self._summary, json.dumps(summary, indent=1) + "\n", mode=SHARED)
        made = self._results.with_suffix(".tgz")
        with tarfile.open(made, "w:gz") as archive:
            for path in sorted(self._results.rglob("*")):
                if path.is_file() and path.stat().st_size <= _LARGEST_KEPT_BYTES:
                    archive.add(path, path.relative_to(self._results.parent))
        write_atomically(self._archive, made.read_bytes(), mode=SHARED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs commands one after the other.

    Fields:
        report: where they are entered.
        device: `cuda`, or `cpu` in a rehearsal.
        results: folder of what they leave.
        environment: variables of their processes.
        end_s: when no time is left, by `time.monotonic`.
        patience: factor of limits; a rehearsal may share its CPU with anything.
    """

    report: Report
    device: str
    results: Path
    environment: Mapping[str, str]
    end_s: float
    patience: float

    def run(self, stage: str, command: Command) -> Ending:
        """Run a command, for as long as it may and as time is left, and return how it ended."""
        words = command.line(device=self.device, results=self.results)
        line = shlex.join(["python3", *words])
        limit_s = min(self.patience * command.limit_s, self.end_s - time.monotonic())
        print(f"== {stage}: {command.name}, at most {max(limit_s, 0):.0f} s", flush=True)
        start_s, offset = time.monotonic(), self.report.log.stat().st_size
        code, status = None, "skipped"
        if limit_s > 0:
            code = self._code(words, line, limit_s)
            status = "timeout" if code is None else "ok" if code == 0 else "failed"
        wall_s = round(time.monotonic() - start_s, 1)
        ending = Ending(
            name=command.name, stage=stage, line=line, status=status, code=code, wall_s=wall_s,
            limit_s=round(limit_s, 1),
        )  # fmt: skip
        self.report.endings.append(ending)
        self.report.pack()
        print(_tail(self.report.log, offset))
        print(f"== {stage}: {command.name}: {status}, {wall_s:.0f} of {max(limit_s, 0):.0f} s", flush=True)
        return ending

    def _code(self, words: Sequence[str], line: str, limit_s: float) -> int | None:
        """Return the exit status of a command, `None` where it was ended at its limit."""
        end_s = time.monotonic() + limit_s
        with self.report.log.open("ab") as log:
            log.write(f"\n== {line}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                while (left_s := end_s - time.monotonic()) > 0:
                    try:
                        return process.wait(min(left_s, _PACK_EVERY_S))
                    except subprocess.TimeoutExpired:
                        self.report.pack()
            finally:
                _end(process)
        return None


def main() -> int:
    """Run the stages asked for; return 1 if a command did not end as it should."""
    arguments = _arguments()
    end_s = time.monotonic() + 60 * arguments.minutes
    device = "cpu" if arguments.rehearse else "cuda"
    with tempfile.TemporaryDirectory() as folder, sigterm_exits():
        results = Path(folder, "results")
        results.mkdir()
        report = Report(arguments.out, results)
        runner = Runner(
            report=report,
            device=device,
            results=results,
            environment=_environment(Path(folder, "packages"), device),
            end_s=end_s,
            patience=_REHEARSAL_PATIENCE if arguments.rehearse else 1.0,
        )
        if runner.run("machine", MACHINE).status != "ok":
            print("make gpu: this machine cannot run it, and the lines above say why", file=sys.stderr)
            return 1
        try:
            for stage in arguments.stages:
                for command in STAGES[stage].commands:
                    runner.run(stage, command)
        finally:
            report.pack()  # a caller's `timeout` ended the last command before it was entered
    wrong = [f"{each.name} ({each.status})" for each in report.endings if each.status != "ok"]
    print(f"{len(report.endings) - len(wrong)} of {len(report.endings)} commands ended well; {arguments.out}")
    if wrong:
        print(f"make gpu: not well: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python3 -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name}: {stage.question} ({stage.limit_s} s)" for name, stage in STAGES.items()),
    )
    default = Path(os.environ.get("OUT", "outputs/gpu"))
    made.add_argument("stages", nargs="*", metavar="STAGE", help=f"all by default: {', '.join(STAGES)}")
    made.add_argument("--out", type=Path, default=default, help="folder of the three files ($OUT)")
    made.add_argument("--minutes", type=float, default=60.0, help="time for everything; the rest is skipped")
    made.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    found = made.parse_args()
    unknown = [stage for stage in found.stages if stage not in STAGES]
    if unknown:
        made.error(f"STAGE: there is no {unknown[0]!r}; there are {', '.join(STAGES)}")
    found.stages = found.stages or list(STAGES)
    return found


def _environment(packages: Path, device: str) -> dict[str, str]:
    """Return the variables of commands, with the packages of wheels unpacked where there are any."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if wheels:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(packages), *wheels]
        subprocess.run(command, check=True)
    paths = [str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
    rehearsal = {REHEARSAL: "1"} if device == "cpu" else {}
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **rehearsal,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started; ask first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path, offset: int) -> str:
    """Return the last lines of what was added to `log` from `offset` on."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main())
