"""Whose code raised an exception: that of a model or of its loss, or ours."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

from harness.errors import ConfigError
from strategies.last_words import last_words

_HARNESS = Path(__file__).parents[1]
_OURS = (_HARNESS, _HARNESS.parent / "strategies")
_MODELS = _HARNESS / "models"
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_CALLING_A_LOSS = (
    ("harness.models.parts.given_inputs", "GivenInputs"),
    ("harness.fit.in_process", "InProcessSpec"),
)
"""The classes that call the user's loss; their modules import torch, and this one does not."""

_PACKAGES = ("site-packages", "dist-packages")


_TOO_LARGE = "a tensor of the step has more bytes than 64 bits can count"


def overflow(error: Exception) -> ConfigError | None:
    """Return the refusal of sizes whose product torch cannot hold; `None` of another error."""
    words = last_words(error)
    if "overflow" not in words.message.lower() or not isinstance(
        error, RuntimeError | TypeError | ValueError
    ):
        return None
    remedy = "make batch_size, sequence_length or the model smaller"
    return ConfigError("model", f"{_TOO_LARGE} ({words.message.splitlines()[0]}); {remedy}")


def raised_by_model(error: Exception) -> str | None:
    """Return what the code of a model or its loss raised, with the place; `None` where it is not their own.

    It is theirs where a module or the user's loss called what raised, torch for example, and nothing of ours
    raised it: what we do around a model can raise, too.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or _is_ours(Path(frames[-1][0].f_code.co_filename)):
        return None
    calling = (number for number, (frame, _) in enumerate(frames) if _calls_the_users(frame))
    begin = next(calling, len(frames))
    found = [(frame, line) for frame, line in frames[begin:] if _is_of_model(frame)]
    if not found:
        return None
    frame, line = found[-1]
    code, words = frame.f_code, last_words(error)
    return f"{words.kind}: {words.message} ({Path(code.co_filename).name}, line {line}, in {code.co_name})"


def _is_of_model(frame: FrameType) -> bool:
    """Say if this is a method of a module that is neither torch's nor ours, or a function of the user's."""
    path = Path(frame.f_code.co_filename)
    if _is_ours(path) or not path.is_absolute():  # else code that was made of a text
        return False
    if any(name in path.parts for name in _PACKAGES):
        return _is_module(frame.f_locals.get("self"))
    return not path.is_relative_to(_LIBRARY)


def _calls_the_users(frame: FrameType) -> bool:
    value = frame.f_locals.get("self")
    is_of_module = _is_module(value) and _is_of_model(frame)
    return is_of_module or (type(value).__module__, type(value).__name__) in _CALLING_A_LOSS


def _is_module(value: object) -> bool:
    kind = type(value)
    names = {base.__module__ for base in kind.__mro__}
    return kind.__module__.partition(".")[0] != "torch" and "torch.nn.modules.module" in names


def _is_ours(path: Path) -> bool:
    return any(path.is_relative_to(each) for each in _OURS) and not path.is_relative_to(_MODELS)
