"""`make gpu` on a machine without a GPU: every command is understood, and what it runs works on the CPU.

`make gpu-rehearsal` runs all commands; here are the cheap ones.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from bench import gpu, gpu_machine
from bench.gpu import CALLS, IN_PROCESS_TESTS, RANK_TESTS, REHEARSAL, STAGES, Command, Stage
from bench.overhead import steps
from harness.command_line import cli
from harness.command_line.schema import experiment_fields, materialise, swept_variants, without_idle_options
from harness.errors import ConfigError
from harness.experiment import devices
from strategies import StrategyError

ROOT = Path(gpu.__file__).parents[1]
COMMANDS = {command.name: command for stage in STAGES.values() for command in stage.commands}
CALL_S = 570
"""A call of ten minutes, less what its start takes."""
ALL_CALLS_S = 1650
"""Thirty minutes, less the start of the machine."""
BROUGHT = ("torch", "hydra-core", "omegaconf", "submitit", "pytest", "numpy", "rich", "nvidia-ml-py")
"""Distributions that a machine has or gets as wheels; what they require comes along."""


def of_module(start: str) -> list[Any]:
    named = [(command, command.words.split()[1]) for command in COMMANDS.values()]
    return [pytest.param(command, id=command.name) for command, module in named if module.startswith(start)]


@pytest.mark.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("command", of_module("harness"))
def test_every_point_of_a_sweep_is_an_experiment(
    command: Command, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[DictConfig] = []

    def keep(configs: Sequence[DictConfig], *_: Any) -> list[Any]:
        swept.extend(configs)
        return [("", None) for _ in configs]

    monkeypatch.setattr(cli, "_run_sweep", keep)
    monkeypatch.setattr(sys, "argv", ["acbench", *command.line(device=device, results=tmp_path)[2:]])
    cli.main()
    assert len(swept) > 1
    assert [found for found in refusals(swept) if found is not None] == []
    assert {config.mesh.device for config in swept} == {device}
    assert {Path(config.outputs_dir, config.name) for config in swept} == {tmp_path / command.name}


def refusals(configs: Sequence[DictConfig]) -> list[str | None]:
    fields = [experiment_fields(config) for config in configs]
    return [refusal(without_idle_options(each, swept_variants(fields))) for each in fields]


def refusal(fields: Mapping[str, Any]) -> str | None:
    try:
        materialise(fields)
    except (ConfigError, StrategyError) as error:
        return str(error)
    return None


def test_proofs_of_a_stage_are_there() -> None:
    proofs = [command for command in COMMANDS.values() if "tests/matrix/" in command.words]
    assert {command.name.partition("_")[0] for command in proofs} == {"parity", "detection", "exactness"}
    for command in proofs:
        words = command.line(device="cuda", results=Path("unused"))
        (file,) = [word for word in words if word.startswith("tests/matrix/")]
        assert (ROOT / file).is_file()
        assert words[words.index("--device") + 1] == "cuda"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("command", [*of_module("bench"), pytest.param(gpu.MACHINE, id="machine")])
def test_every_benchmark_has_its_options(
    command: Command, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, *options = command.line(device=device, results=tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *options])
    if module == "bench.overhead":
        found = steps._arguments(options[2:])
    else:
        found = importlib.import_module(module)._arguments()
    assert found.device == device
    assert getattr(found, "out", tmp_path).is_relative_to(tmp_path)
    models = [getattr(found, "model", "mlp"), *getattr(found, "models", ())]
    assert [name for name in models if not (ROOT / "conf/model" / f"{name}.yaml").is_file()] == []


def test_every_file_has_tests_of_the_gpu_and_needs_no_other_packages() -> None:
    """The tests that need no ranks run too, on the CPU."""
    modules = {command.words.split()[1] for command in COMMANDS.values()} - {"pytest"}
    (options,) = {_options(command) for command in COMMANDS.values() if "-m gpu" in command.words}
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({blocked()!r}))
for module in {sorted(modules)!r}:
    importlib.import_module(module)
import harness.command_line.cli, harness.trial.run, pytest
code = pytest.main([*{options!r}, *{IN_PROCESS_TESTS!r}, "-vv"])
sys.exit(code or pytest.main([*{options!r}, *{RANK_TESTS!r}, "--collect-only"]))
"""
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        REHEARSAL: "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"(?m)^(tests/\S+?)::.* PASSED", done.stdout)) == set(IN_PROCESS_TESTS)
    assert set(re.findall(r"(?m)^(tests/\S+?)::\S+$", done.stdout)) == set(RANK_TESTS)
    assert "skipped" not in done.stdout.lower()


def _options(command: Command) -> tuple[str, ...]:
    words = command.line(device="cpu", results=Path("unused"))[2:]
    end = words.index("--junitxml")
    return tuple(words[:end])


def blocked() -> list[str]:
    """Return the modules that are installed here and that no distribution of `BROUGHT` brings."""
    brought = set(_with_requirements(BROUGHT))
    providers = metadata.packages_distributions()
    return [name for name, found in providers.items() if not brought & {_canonical(each) for each in found}]


def _with_requirements(names: Sequence[str]) -> Iterator[str]:
    seen: set[str] = set()
    left = list(names)
    while left:
        name = _canonical(left.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        yield name
        left.extend(re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ["bench", "harness", "strategies", "tests"])
def test_no_package_of_the_machine_is_taken_for_ours(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    found = PathFinder.find_spec(name, [str(ROOT), str(tmp_path)])
    assert found is not None
    assert found.origin == str(ROOT / name / "__init__.py")


def test_there_is_time_for_every_stage_in_four_calls() -> None:
    assert [stage for call in CALLS for stage in call] == list(STAGES)
    times_s = [sum(STAGES[stage].limit_s for stage in call) for call in CALLS]
    assert max(times_s) <= CALL_S
    assert sum(times_s) <= ALL_CALLS_S
    assert len(COMMANDS) == sum(len(stage.commands) for stage in STAGES.values())


def test_the_page_says_what_there_is() -> None:
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    rows = [f"| `{name}` | {stage.question} | {stage.limit_s} s |" for name, stage in STAGES.items()]
    calls = [f'$ make gpu STAGES="{" ".join(call)}" MINUTES=9.5' for call in CALLS]
    assert [line for line in (*rows, *calls) if f"\n{line}\n" not in page] == []


PRINTS = Command(name="prints", words="-c 'print(\"on {device}\")'", limit_s=60)
LEAVES = Command(
    name="leaves",
    words="-c 'import pathlib, time; pathlib.Path(\"{results}/found\").touch(); time.sleep(60)'",
    limit_s=1,
)
FAILS = Command(name="fails", words="-c 'raise SystemExit(3)'", limit_s=60)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "_REHEARSAL_PATIENCE", 1.0)
    monkeypatch.setattr(gpu, "MACHINE", Command(name="machine", words="-c pass", limit_s=60))
    monkeypatch.setattr(gpu, "STAGES", {"first": Stage(question="?", commands=(LEAVES, FAILS, PRINTS))})
    return tmp_path / "out"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    return gpu.main()


def statuses(out: Path) -> dict[str, str]:
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    return {command["name"]: command["status"] for command in summary["commands"]}


def test_a_command_that_fails_or_takes_too_long_keeps_no_other_from_running(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--rehearse", "--out", str(out)) == 1
    assert statuses(out) == {"machine": "ok", "leaves": "timeout", "fails": "failed", "prints": "ok"}
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.tgz", "summary.json"]
    assert "on cpu" in (out / "log.txt").read_text("utf-8")
    with tarfile.open(out / "results.tgz") as archive:
        assert archive.getnames() == ["results/found"]
    printed = capsys.readouterr()
    assert "on cpu" in printed.out
    assert printed.err == "make gpu: not well: leaves (timeout), fails (failed)\n"


def test_what_there_is_no_time_for_is_skipped(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = replace(LEAVES, limit_s=60)
    monkeypatch.setattr(gpu, "STAGES", {"first": Stage(question="?", commands=(endless, PRINTS))})
    assert run(monkeypatch, "--rehearse", "--out", str(out), "--minutes", "0.02") == 1
    assert statuses(out) == {"machine": "ok", "leaves": "timeout", "prints": "skipped"}


def test_commands_find_the_packages_of_wheels(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, about = out.with_name("wheels"), "brought-1.dist-info"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "WORD = 'unpacked'")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    imports = Command(name="imports", words="-c 'import brought; print(brought.WORD)'", limit_s=60)
    monkeypatch.setattr(gpu, "WHEELS", wheels)
    monkeypatch.setattr(gpu, "STAGES", {"first": Stage(question="?", commands=(imports,))})
    assert run(monkeypatch, "--rehearse", "--out", str(out)) == 0
    assert "unpacked" in (out / "log.txt").read_text("utf-8")


def test_a_machine_that_cannot_run_it_ends_it(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MACHINE", Command(name="machine", words="-c 'raise SystemExit(1)'", limit_s=60))
    assert run(monkeypatch, "--rehearse", "--out", str(out), "first") == 1
    assert statuses(out) == {"machine": "failed"}


def test_a_stage_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "test")
    assert "STAGE: there is no 'test'; there are tests, parity, models, " in capsys.readouterr().err


def test_a_callers_timeout_keeps_what_there_is(tmp_path: Path) -> None:
    program = f"""
import sys
from bench import gpu, gpu_machine
from bench.gpu import Command, Stage
gpu.MACHINE = Command(name="machine", words="-c pass", limit_s=60)
words = "-c 'import pathlib, time; pathlib.Path(\\"{{results}}/found\\").touch(); time.sleep(60)'"
gpu.STAGES = {{"first": Stage(question="?", commands=(Command(name="leaves", words=words, limit_s=60),))}}
sys.argv = ["gpu", "--rehearse", "--out", {str(tmp_path)!r}]
sys.exit(gpu.main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "== first: leaves" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    process.stdout.close()
    with tarfile.open(tmp_path / "results.tgz") as archive:
        assert archive.getnames() == ["results/found"]


@pytest.mark.slow
def test_trials_of_a_stage_run_out_of_memory_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MACHINE", Command(name="machine", words="-c pass", limit_s=60))
    monkeypatch.setattr(gpu, "STAGES", {"memory": Stage(question="?", commands=(COMMANDS["out_of_memory"],))})
    assert run(monkeypatch, "--rehearse", "--out", str(tmp_path), "memory") == 0
    assert statuses(tmp_path) == {"machine": "ok", "out_of_memory": "ok"}
    with tarfile.open(tmp_path / "results.tgz") as archive:
        names = Counter(Path(name).name for name in archive.getnames())
    assert names["record.json"] == 2


@pytest.mark.parametrize(
    ("device", "needed", "code", "said"),
    [
        pytest.param("cpu", gpu_machine.NEEDED, 0, "NVML: energy counter ", id="everything is there"),
        pytest.param(
            "cpu",
            ("numpy", "no_such_package"),
            1,
            "make gpu: no_such_package cannot be imported; `make gpu-wheels` elsewhere brings wheels",
            id="a package is missing",
        ),
        pytest.param(
            "cuda",
            gpu_machine.NEEDED,
            1,
            "make gpu: needs a CUDA device, and this torch sees none",
            id="there is no GPU",
        ),
    ],
)
def test_the_machine_is_looked_at_first(
    device: str,
    needed: tuple[str, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_machine, "NEEDED", needed)
    monkeypatch.setattr(devices, "has_cuda", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_machine", "--device", device])
    assert gpu_machine.main() == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        pytest.param(
            "gpu STAGES='tests parity' MINUTES=9.5",
            r"python3 -m bench.gpu tests parity --minutes 9.5",
            id="stages and minutes are chosen",
        ),
        pytest.param("gpu", r"python3 -m bench.gpu *", id="everything"),
        pytest.param("gpu-wheels", r".*pip wheel --quiet --no-deps --wheel-dir .whl", id="wheels"),
    ],
)
def test_a_target_runs_the_program(line: str, printed: str) -> None:
    command = f"make --no-print-directory --dry-run {line}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(printed, done.stdout.strip())


def test_the_wheels_are_among_the_pins() -> None:
    (names,) = re.findall(r"(?m)^GPU_WHEELS := (.+)$", (ROOT / "Makefile").read_text("utf-8"))
    pins = re.findall(r"(?m)^([\w-]+)==", (ROOT / "constraints.txt").read_text("utf-8"))
    assert set(names.split("|")) <= set(pins)
    assert len(names.split("|")) == 4
