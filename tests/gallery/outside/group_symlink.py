"""A member of the group plants links in the folder of a running sweep, to files of the user that runs it.

The log of a rank emptied the one, the report of a rank made the other readable for everybody.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from tests.gallery.outside._commands import ENVIRONMENT, MODEL, PROGRAM

BEFORE = "a private file was changed"
RIGHT = "no file was changed"


def answer() -> str:
    """Return whether files outside of the sweep are as they were."""
    Path("linked.py").write_text(MODEL)
    key, precious = Path("key").absolute(), Path("precious").absolute()
    for path in (key, precious):
        path.write_text("PRIVATE")
        path.chmod(0o600)
    os.umask(0o002)
    words = (
        "model=python model.factory=linked:make model.layers_fqn=blocks protocol=parity tracker=none ac=full"
    )
    short = "protocol.parity_steps=1 protocol.probes=false name=v"
    sweep = subprocess.Popen(
        [*PROGRAM, "-m", *words.split(), *short.split()],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stranger = threading.Thread(target=_plant, args=(sweep, key, precious))
    stranger.start()
    sweep.wait()
    stranger.join()
    is_whole = [
        path.read_text() == "PRIVATE" and path.stat().st_mode & 0o777 == 0o600 for path in (key, precious)
    ]
    return "no file was changed" if all(is_whole) else "a private file was changed"


def _plant(sweep: subprocess.Popen[bytes], key: Path, precious: Path) -> None:
    """Put links into the trial's folder as soon as it has been cleared, until the sweep ends."""
    done: set[str] = set()
    while sweep.poll() is None and len(done) < 2:
        for experiment in Path("outputs/v").glob("*/experiment.yaml"):
            for name, target in (("rank0.log", precious), (".rank0.json", key)):
                if name not in done and not os.path.lexists(experiment.with_name(name)):
                    experiment.with_name(name).symlink_to(target)
                    done.add(name)
