"""What `mesh.device` means on a machine, and that torch is asked only where a driver is."""

from __future__ import annotations

import pytest
import torch

from harness.experiment import devices
from harness.experiment.devices import cuda_count, device_type, has_cuda
from harness.experiment.mesh import Mesh


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for the files that the driver of a GPU brings along."""
    monkeypatch.setattr(devices, "_DRIVERS", ("/no/such/file", "/dev/null"))


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("asked", "torch_sees", "used"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", False, "cuda")],
)
def test_device_type(monkeypatch: pytest.MonkeyPatch, asked: str, torch_sees: bool, used: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees)
    assert device_type(Mesh(device=asked)) == used


@pytest.mark.usefixtures("driver")
def test_devices_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert cuda_count() == 3


def test_without_a_driver_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DRIVERS", ("/no/such/file",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    assert (has_cuda(), cuda_count(), device_type(Mesh())) == (False, 0, "cpu")


def test_where_torch_sees_a_device_a_driver_is_found() -> None:
    assert has_cuda() == torch.cuda.is_available()
