"""Files that change a model, as Python modules: read with a limit, each content once a process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from strategies.base import StrategyError
from strategies.text_files import read_text

MOST_BYTES = 1 << 20
"""Of a file; one with rules for a thousand blocks has a tenth of it."""


def source_of(path: str, where: str) -> str:
    """Return the text of a file.

    Args:
        path: relative to the current folder, or absolute.
        where: configuration path that messages name.

    Raises:
        StrategyError: it is no regular file, is too large, or cannot be read as text.
    """
    try:
        return read_text(Path(path), MOST_BYTES)
    except UnicodeDecodeError as error:
        raise StrategyError(where, f"{path!r} is no text in UTF-8; give a text in UTF-8") from error
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        said = error.strerror if isinstance(error, OSError) else error
        raise StrategyError(where, f"{path!r} cannot be read: {said}") from error


def digest_of(source: str) -> str:
    """Return the start of the SHA-256 of a text, 16 hexadecimal digits."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def apply_of(path: str, where: str) -> Callable[[Any], Any]:
    """Return the function `apply` of a file, which takes a model and returns it, or changes it.

    Args:
        path: relative to the current folder, or absolute.
        where: configuration path that messages name.

    Raises:
        StrategyError: it cannot be read or run, or has no such function.
    """
    return function_of(path, ("apply",), where)[1]


def function_of(path: str, names: Sequence[str], where: str) -> tuple[str, Callable[..., Any]]:
    """Return the first of some functions that a file defines, with its name.

    Args:
        path: relative to the current folder, or absolute.
        names: names of the functions, the usual one first.
        where: configuration path that messages name.

    Raises:
        StrategyError: it cannot be read or run, or has no such function.
    """
    defined = vars(_module(path, source_of(path, where), where))
    for name in names:
        if callable(defined.get(name)):
            return name, defined[name]
    problem = f"{path!r} has no function {' or '.join(f'`{name}`' for name in names)}"
    raise StrategyError(where, f"{problem}; write `def {names[0]}(model)` in it")


def _module(path: str, source: str, where: str) -> ModuleType:
    """Return the module of a file, in `sys.modules`, so that what it defines can be pickled."""
    name = f"acbench_file_{digest_of(source)}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(Path(path).resolve())
    sys.modules[name] = module
    try:
        exec(compile(source, module.__file__, "exec", dont_inherit=True), vars(module))  # noqa: S102 (the user's own code)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        said = f"{type(error).__name__}: {error}"
        raise StrategyError(where, f"{path!r} cannot be imported: {said}") from error
    return module
