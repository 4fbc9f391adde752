"""What a machine brings to `make gpu`: packages, devices, and what the driver's library answers.

Returns 1, with the remedy, where a package is missing or torch sees no device.

    python3 -m bench.gpu_machine --device cuda
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sys

NEEDED = ("torch", "numpy", "pytest", "rich", "yaml", "pynvml", "hydra", "omegaconf", "antlr4", "submitit")
"""Modules that the stages import."""


def main() -> int:
    """Print what is there; return 1 where a stage could not work."""
    device = _arguments().device
    print(f"python {platform.python_version()} at {sys.executable}")
    print(f"{platform.platform()}, {os.cpu_count()} CPUs")
    missing = missing_packages()
    if missing:
        print(f"make gpu: {', '.join(missing)} cannot be imported; `make gpu-wheels` elsewhere brings wheels")
        return 1
    return int(not _has_device(device))


def missing_packages() -> list[str]:
    """Return those of `NEEDED` that cannot be imported, and print the versions of the others."""
    missing = []
    for name in NEEDED:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}")
            missing.append(name)
        else:
            print(f"{name} {getattr(module, '__version__', '')} at {getattr(module, '__file__', None)}")
    return missing


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu_machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return made.parse_args()


def _has_device(device: str) -> bool:
    """Print what torch, acbench and the driver's library say of the device; return whether it is there."""
    import torch  # noqa: PLC0415 (only now it is known to be there)

    from harness.experiment.devices import cuda_count, has_cuda  # noqa: PLC0415 (as above)
    from harness.measure import nvml  # noqa: PLC0415 (as above)

    is_there = torch.cuda.is_available()
    print(f"torch built for CUDA {torch.version.cuda}; sees a device: {is_there}")
    print(f"acbench sees CUDA: {has_cuda()}, {cuda_count()} devices")
    print(f"NVML: device {nvml.device_name(0)!r}, driver {nvml.driver_version()!r}")
    print(f"NVML: processes {nvml.device_processes(0)}")
    with nvml.energy_meter(0) as energy:
        pass
    print(f"NVML: energy counter {'missing' if energy.joules is None else 'there'}")
    if is_there:
        print(torch.cuda.get_device_properties(0))
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)  # noqa: S607 (where the machine has it)
    if device == "cuda" and not has_cuda():
        print("make gpu: needs a CUDA device, and this torch sees none")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
