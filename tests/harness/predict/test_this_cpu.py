"""The numbers of this machine: measured once for a CPU and a torch, and kept in the user's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.command_line.schema import hardware_of
from harness.errors import ConfigError
from harness.predict import this_cpu
from harness.predict.hardware import Hardware
from tests.harness.composing import composed
from tests.harness.predict.predicted import CONF

FIELDS: dict[str, Any] = {
    **OmegaConf.to_container(OmegaConf.load(CONF / "epyc_9004.yaml")),  # type: ignore[dict-item]
    "name": this_cpu.THIS_CPU,
}


class Machine:
    """A CPU whose measurements are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._patch = monkeypatch
        monkeypatch.setattr(this_cpu, "_measured", self._measured)

    def named(self, name: str) -> None:
        """Be another CPU, in another process."""
        self._patch.setattr(this_cpu, "cpu_name", lambda: name)
        this_cpu._known_or_measured.cache_clear()

    def _measured(self) -> dict[str, Any]:
        self.count += 1
        return FIELDS


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Machine(monkeypatch)
    made.named("a CPU")
    yield made
    this_cpu._known_or_measured.cache_clear()


def test_each_cpu_is_measured_once(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for name in ("a CPU", "a CPU", "another CPU", "a CPU", "another CPU"):
        machine.named(name)
        assert this_cpu.numbers_of_this_cpu() == FIELDS
        counts.append(machine.count)
    assert counts == [1, 1, 2, 2, 2]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("acbench: measuring this CPU for hardware=this_cpu (a CPU, ")
    assert said[0].endswith("; this takes some seconds, once")
    machine.named("a CPU")
    assert said[1] == f"acbench: kept in {this_cpu.cache_file()}; acbench-calibrate measures anew"
    assert len(said) == 4


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("[1, 2]", id="something else"),
        pytest.param('{"identity": ["a CPU", 1, "0"], "hardware": {}}', id="no numbers"),
        pytest.param(json.dumps({"identity": ["mine", 1, "0"], "hardware": FIELDS}), id="of another machine"),
        pytest.param(
            json.dumps({"identity": ["a CPU", 1, "0"], "hardware": FIELDS | {"bytes_per_s": -1.0}}),
            id="a number that cannot be",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_measured_anew(machine: Machine, content: str) -> None:
    path = this_cpu.keep(FIELDS)
    path.write_text(content)
    assert this_cpu.numbers_of_this_cpu() == FIELDS
    assert machine.count == 1


def test_a_cache_that_cannot_be_written_keeps_nobody_waiting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert this_cpu.numbers_of_this_cpu() == FIELDS
    assert machine.count == 1
    assert "acbench: not kept, so it is measured again next time: " in capsys.readouterr().err


@pytest.mark.usefixtures("machine")
def test_a_number_that_is_given_replaces_the_measured_one() -> None:
    words = ["hardware=this_cpu", "hardware.usable_gib=40", "hardware.flops_per_s.bf16=1e9"]
    found = hardware_of(composed(words))
    rates = FIELDS["flops_per_s"] | {"bf16": 1e9}
    assert found == Hardware(**FIELDS | {"usable_gib": 40.0, "flops_per_s": rates})


@pytest.mark.parametrize(
    ("output", "errors", "message"),
    [
        pytest.param(
            "",
            "Traceback\nImportError: no torch\n",
            "hardware: this CPU could not be measured: ImportError: no torch; name other hardware, or "
            "leave it out",
            id="it fails",
        ),
        pytest.param(
            "{}",
            "",
            "hardware: this CPU could not be measured: exit 0; name other hardware, or leave it out",
            id="it says nothing",
        ),
    ],
)
def test_a_measurement_that_fails_is_refused(
    monkeypatch: pytest.MonkeyPatch, output: str, errors: str, message: str
) -> None:
    done = subprocess.CompletedProcess([], 0, output, errors)
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: done)
    with pytest.raises(ConfigError) as refusal:
        this_cpu.calibrated()
    assert str(refusal.value) == message


def test_the_command_prints_what_a_file_of_hardware_holds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    this_cpu.keep(FIELDS)
    monkeypatch.setattr(sys, "argv", ["acbench-calibrate", "--name", "mine"])
    this_cpu.main()
    made = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert made == FIELDS | {"name": "mine"}
    assert machine.count == 1  # anew
