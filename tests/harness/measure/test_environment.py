from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from harness.measure import environment, nvml
from harness.measure.environment import describe, environment_id
from harness.measure.nvml import DeviceProcess, Energy


@pytest.fixture
def known() -> dict[str, Any]:
    return {
        "python": "3.11.7",
        "torch": "2.13.0",
        "cuda": "13.0",
        "backend": "nccl",
        "device": "NVIDIA H200",
        "cpus": 16,
        "omp_num_threads": None,
        "driver": "580.1",
        "host": "node1",
        "world_size": 2,
        "commit": "abc",
        "packages": {"torch": "2.13.0"},
        "source_digest": "0" * 64,
        "files": {},
        "foreign_processes": [],
    }


@pytest.fixture(autouse=True)
def _as_a_new_process() -> Iterator[None]:
    environment._own.cache_clear()
    yield
    environment._own.cache_clear()


class TestDescribe:
    def test_a_cpu_environment_is_complete(self) -> None:
        found = describe(torch.device("cpu"))
        fixed: dict[str, object] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "backend": None,
            "cpus": os.cpu_count(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "driver": None,
            "host": platform.node(),
            "world_size": 1,
            "files": {},
            "foreign_processes": None,
        }
        assert {key: found[key] for key in fixed} == fixed
        assert set(found) == {*fixed, "device", "commit", "packages", "source_digest"}
        assert found["device"]

    def test_it_is_plain_json(self) -> None:
        found = describe("cpu")
        assert json.loads(json.dumps(found)) == found

    def test_packages_have_the_installed_version(self) -> None:
        packages = describe("cpu")["packages"]
        assert packages["hydra-core"] == importlib.metadata.version("hydra-core")

    def test_packages_that_are_not_installed_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "_PACKAGES", ("torch", "no-such-package-of-anybody"))
        assert list(describe("cpu")["packages"]) == ["torch"]

    def test_no_cuda_context_is_made(self) -> None:
        describe("cuda")
        assert not torch.cuda.is_initialized()


class TestIdentity:
    def test_it_is_twelve_hexadecimal_digits(self, known: dict[str, Any]) -> None:
        assert environment_id(known) == environment_id(dict(reversed(known.items())))
        assert len(environment_id(known)) == 12
        assert int(environment_id(known), 16) >= 0

    @pytest.mark.parametrize(
        "key",
        [
            "python",
            "torch",
            "cuda",
            "device",
            "cpus",
            "omp_num_threads",
            "driver",
            "packages",
            "source_digest",
            "files",
        ],
    )
    def test_another_value_is_another_environment(self, known: dict[str, Any], key: str) -> None:
        assert environment_id(known | {key: "another"}) != environment_id(known)

    @pytest.mark.parametrize("key", ["backend", "host", "world_size", "commit", "foreign_processes"])
    def test_what_changes_no_result_does_not_count(self, known: dict[str, Any], key: str) -> None:
        assert environment_id(known | {key: "another"}) == environment_id(known)

    def test_an_edited_file_of_the_user_is_another_environment(self, tmp_path: Path) -> None:
        path = tmp_path / "model.py"
        path.write_text("width = 1\n")
        before = environment_id(describe("cpu", [path]))
        assert environment_id(describe("cpu", [path])) == before
        path.write_text("width = 2\n")
        assert environment_id(describe("cpu", [path])) != before

    def test_a_touched_file_of_the_user_is_the_same_environment(self, tmp_path: Path) -> None:
        path = tmp_path / "model.py"
        path.write_text("width = 1\n")
        before = describe("cpu", [path])["files"]
        os.utime(path, ns=(0, 0))
        assert describe("cpu", [path])["files"] == before
        assert before == {str(path): hashlib.sha256(b"width = 1\n").hexdigest()[:12]}

    def test_a_large_file_is_known_by_size_and_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(environment, "_READ_BYTES", 3)
        path = tmp_path / "tokens.bin"
        path.write_bytes(b"1234")
        os.utime(path, ns=(5, 5))
        assert describe("cpu", [path])["files"] == {str(path): "4 bytes, 5 ns"}

    @pytest.mark.parametrize("name", ["absent.npy", ".", "absent/tokens.npy"])
    def test_a_path_without_a_file_is_known_as_such(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        assert describe("cpu", [path])["files"] == {str(path): "no file"}

    def test_it_is_the_same_in_driver_and_rank(self) -> None:
        assert environment_id(describe("cpu")) == environment_id(describe(torch.device("cpu", 0)))


class TestSources:
    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "one.py").write_text("one = 1\n")
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "two.cpp").write_text("int two;\n")
        monkeypatch.setattr(environment, "_package_root", lambda _: tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("path", "content"),
        [
            pytest.param("one.py", "one = 2\n", id="changed"),
            pytest.param("inner/two.cpp", "int other;\n", id="changed native source"),
            pytest.param("three.py", "", id="added"),
        ],
    )
    def test_another_source_is_another_digest(self, package: Path, path: str, content: str) -> None:
        before = environment._source_digest()
        (package / path).write_text(content)
        assert environment._source_digest() != before

    def test_a_moved_source_is_another_digest(self, package: Path) -> None:
        before = environment._source_digest()
        (package / "one.py").rename(package / "inner" / "one.py")
        assert environment._source_digest() != before

    def test_caches_do_not_count(self, package: Path) -> None:
        before = environment._source_digest()
        (package / "one.pyc").write_bytes(b"anything")
        assert environment._source_digest() == before

    def test_what_a_process_runs_is_what_it_found_first(self, package: Path) -> None:
        environment.note_own_code()
        before = describe("cpu")
        (package / "one.py").write_text("one = 2\n")
        assert describe("cpu") == before


class TestCommit:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        def git(*arguments: str) -> None:
            identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
            subprocess.run(
                ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True
            )

        source = tmp_path / "source.py"
        source.write_text("one = 1\n")
        (tmp_path / "untracked.py").write_text("")
        git("init")
        git("add", "source.py")
        git("commit", "-m", "one")
        return source

    def test_a_clean_checkout_has_its_commit(self, checkout: Path) -> None:
        found = environment._commit(checkout)
        assert found is not None
        assert len(found) == 40

    def test_a_changed_checkout_says_so(self, checkout: Path) -> None:
        clean = environment._commit(checkout)
        checkout.write_text("one = 2\n")
        assert environment._commit(checkout) == f"{clean}-dirty"

    def test_a_file_that_the_repository_does_not_track_has_none(self, checkout: Path) -> None:
        assert environment._commit(checkout.with_name("untracked.py")) is None

    def test_without_git_there_is_none(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert environment._commit(checkout) is None


class FakeDriver:
    """The management library of a node with two GPUs; handles are device numbers."""

    UUIDS = ("GPU-aaaa-1", "GPU-bbbb-2")

    def __init__(self) -> None:
        self.millijoules = 1_000
        self.pids = {os.getpid(): 10, 77: 20}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": self.handle,
            "nvmlDeviceGetUUID": lambda handle: self.UUIDS[handle],
            "nvmlDeviceGetHandleByUUID": lambda name: f"instance {name}",
            "nvmlDeviceGetName": lambda handle: f"GPU number {handle}",
            "nvmlDeviceGetTotalEnergyConsumption": self.energy,
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [
                SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.pids.items()
            ],
            "nvmlSystemGetProcessName": self.process_name,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    def handle(self, index: int) -> int:
        if index >= 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def energy(self, _handle: int) -> int:
        self.millijoules += 2_500
        return self.millijoules

    def process_name(self, pid: int) -> str:
        if pid != 77:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return "blender"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    fake.install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.usefixtures("driver")
class TestNvml:
    @pytest.mark.parametrize(
        ("visible", "index", "name"),
        [
            pytest.param(None, 1, "GPU number 1", id="all visible"),
            pytest.param("1,0", 0, "GPU number 1", id="other order"),
            pytest.param("GPU-bbbb", 0, "GPU number 1", id="start of a UUID"),
            pytest.param("0, MIG-cccc", 1, "GPU number instance MIG-cccc", id="instance of a GPU"),
            pytest.param("1", 1, None, id="beyond the visible ones"),
            pytest.param("", 0, None, id="none visible"),
            pytest.param("GPU-dddd", 0, None, id="unknown UUID"),
            pytest.param("7", 0, None, id="unknown number"),
        ],
    )
    def test_a_device_is_named_as_cuda_numbers_it(
        self, monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, name: str | None
    ) -> None:
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert nvml.device_name(index) == name

    def test_processes_are_listed_with_their_names(self) -> None:
        assert nvml.device_processes(0) == [
            DeviceProcess(pid=os.getpid(), name="unknown", used_bytes=10),
            DeviceProcess(pid=77, name="blender", used_bytes=20),
        ]

    def test_energy_is_the_difference_of_the_counter(self) -> None:
        with nvml.energy_meter(0) as energy:
            assert energy == Energy(joules=None)
        assert energy.joules == pytest.approx(2.5)

    def test_a_described_gpu_names_foreign_processes_but_not_itself(self) -> None:
        found = describe("cuda:1")
        assert (found["device"], found["driver"]) == ("GPU number 1", "580.1")
        assert found["foreign_processes"] == [{"pid": 77, "name": "blender", "used_bytes": 20}]

    def test_a_rank_that_cannot_find_itself_accuses_nobody(
        self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        del driver.pids[os.getpid()]
        assert describe("cuda")["foreign_processes"] == [{"pid": 77, "name": "blender", "used_bytes": 20}]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert describe("cuda")["foreign_processes"] is None


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    with nvml.energy_meter(0) as energy:
        pass
    assert (nvml.device_name(0), nvml.driver_version(), nvml.device_processes(0)) == (None, None, None)
    assert energy.joules is None


def test_without_a_counter_energy_is_unknown(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_handle: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", unsupported)
    with nvml.energy_meter(0) as energy:
        pass
    assert energy.joules is None
    assert driver.millijoules == 1_000
