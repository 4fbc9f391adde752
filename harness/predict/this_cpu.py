"""`hardware=this_cpu`: the numbers of this machine, measured at their first use and kept in the user's cache.

A file of the cache is for one CPU, number of cores and version of torch: on a cluster, nodes share a home.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.measure.environment import cpu_name, torch_version
from harness.predict.hardware import Hardware
from harness.records.files import make_folder, read_text, write_atomically

THIS_CPU = "this_cpu"
_DEADLINE_S = 600.0
_MOST_BYTES = 1 << 16
_PROGRAM = "acbench-calibrate"


def main() -> None:
    """Measure this CPU anew, keep the numbers for `hardware=this_cpu`, and print them as YAML."""
    given = argparse.ArgumentParser(prog=_PROGRAM, description=main.__doc__)
    given.add_argument("--name", default=THIS_CPU, help="name of the hardware in what is printed")
    given.add_argument("--version", action="version", version=f"{_PROGRAM} {version('acbench')}")
    name: str = given.parse_args().name
    try:
        fields = calibrated()
    except ConfigError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        sys.exit(1)
    sys.stdout.write(as_yaml(fields | {"name": name}))


def numbers_of_this_cpu() -> Mapping[str, Any]:
    """Return the fields of the hardware that this machine is; they are measured where the cache has none.

    Raises:
        ConfigError: they cannot be measured.
    """
    return _known_or_measured(cache_file())


def calibrated() -> dict[str, Any]:
    """Measure this machine in a process of its own, keep what it found, and return it; stderr says so.

    Raises:
        ConfigError: the process fails, or takes too long.
    """
    cpu, cores, torch = _identity()
    sys.stderr.write(
        f"acbench: measuring this CPU for hardware=this_cpu ({cpu}, {cores} cores, torch {torch}); "
        "this takes some seconds, once\n"
    )
    fields = _measured()
    try:
        path = keep(fields)
    except OSError as error:
        sys.stderr.write(f"acbench: not kept, so it is measured again next time: {error}\n")
    else:
        sys.stderr.write(f"acbench: kept in {path}; {_PROGRAM} measures anew\n")
    return fields


def keep(fields: Mapping[str, Any]) -> Path:
    """Write the fields of this machine's hardware to its file of the cache, and return that.

    Raises:
        OSError: it cannot be written.
    """
    path = cache_file()
    make_folder(path.parent)
    write_atomically(path, json.dumps({"identity": _identity(), "hardware": dict(fields)}, indent=1))
    return path


def cache_file() -> Path:
    """Return the file of the cache for this CPU and torch: below `XDG_CACHE_HOME`, or `~/.cache`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = named if named.is_absolute() else Path("~/.cache").expanduser()
    digest = hashlib.sha256(json.dumps(_identity()).encode()).hexdigest()
    return folder / "acbench" / f"cpu-{digest[:12]}.json"


def as_yaml(fields: Mapping[str, Any]) -> str:
    """Return the fields as a file of `conf/hardware` has them."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())


@functools.cache
def _known_or_measured(path: Path) -> Mapping[str, Any]:
    known = _kept(path)
    return calibrated() if known is None else known


def _kept(path: Path) -> dict[str, Any] | None:
    """Return what a file of the cache holds; `None` where it is missing, damaged or of another machine."""
    try:
        content = json.loads(read_text(path, _MOST_BYTES))
        fields: dict[str, Any] = content["hardware"]
        Hardware(**fields)
        return fields if content["identity"] == list(_identity()) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # ValueError: a number that cannot be
        return None


def _measured() -> dict[str, Any]:
    problem = "this CPU could not be measured"
    remedy = "name other hardware, or leave it out"
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "harness.predict.calibration",
            ],  # -P: no file of this folder is imported
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout.rpartition("\n")[2])
        Hardware(**found)
    except subprocess.TimeoutExpired as error:
        raise ConfigError("hardware", f"{problem} within {_DEADLINE_S:.0f} s; {remedy}") from error
    except (ValueError, TypeError) as error:
        why = done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}"
        raise ConfigError("hardware", f"{problem}: {why}; {remedy}") from error
    return found


def _identity() -> tuple[str, int, str]:
    """Return the name of the CPU, the number of its cores that are ours, and the version of torch."""
    return cpu_name(), len(os.sched_getaffinity(0)), str(torch_version()["__version__"])
