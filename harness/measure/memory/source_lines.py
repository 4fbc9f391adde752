"""The line of the model's code that runs: the first frame outside of torch and of acbench."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path

import torch

_HARNESS = Path(__file__).parents[2]
_MODELS = str(_HARNESS / "models") + "/"
"""Models that acbench ships are code of models as those of users are."""

_OUTERMOST = (str(_HARNESS / "measure" / "step.py"), torch.autograd.graph.__file__)
"""What called the step, or in it the engine of backward, has not made what they make."""

_PACKAGES = ("site-packages", "dist-packages")  # below the folder of the standard library
_OTHERS = tuple(
    f"{folder}/"
    for folder in (
        Path(torch.__file__).parent,
        _HARNESS,
        _HARNESS.parent / "strategies",
        _HARNESS.parent / "acbench",
    )
)
_STANDARD = f"{sysconfig.get_path('stdlib')}/"


def source_line() -> str:
    """Return `file:line` of the innermost frame of a model's code; empty where none runs.

    The file is named from the folder that it is imported from.
    """
    frame = sys._getframe(1)  # noqa: SLF001 (`inspect.stack` reads source files)
    while frame is not None and frame.f_code.co_filename not in _OUTERMOST:
        file = _shown(frame.f_code.co_filename)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return ""


@functools.cache
def _shown(file: str) -> str:
    """Return the name of a file of a model; empty of other files."""
    is_shipped = file.startswith(_MODELS)
    if file.startswith("<") or (file.startswith(_OTHERS) and not is_shipped) or _is_standard(file):
        return ""
    roots = [_HARNESS.parent] if is_shipped else [Path(entry or ".").resolve() for entry in sys.path]
    below = [root for root in roots if Path(file).is_relative_to(root)]
    return (
        str(Path(file).relative_to(max(below, key=lambda root: len(root.parts))))
        if below
        else Path(file).name
    )


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and file.removeprefix(_STANDARD).split("/")[0] not in _PACKAGES
