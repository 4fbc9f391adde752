"""The user's own source files behind a module: what it imports, and what that imports."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

_OURS = ("harness", "strategies", "hydra_plugins")
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def user_files(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the files of the modules called `names` and of all they import, sorted.

    The standard library, installed packages (their versions are known), this project and `__main__` are
    left out. Import statements are followed wherever they stand in a file, but only to modules that are
    loaded by now. So the answer depends on `names` alone, not on what else this process has imported.
    """
    found: dict[str, Path] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        path = None if name in found else _user_file(name)
        if path is not None:
            found[name] = path
            waiting += _imports(sys.modules[name], path)
    return tuple(sorted(set(found.values())))


def taken_name(name: str) -> str:
    """Return the end of a message about a module called `name` that was not found; empty where it may be.

    A user's folder with the name of a package of ours is never found, because ours is loaded.
    """
    package = name.partition(".")[0]
    if package not in _OURS:
        return ""
    return f"; {package!r} is a package of acbench, so a folder of yours cannot have this name: rename it"


def _user_file(name: str) -> Path | None:
    """Return the file of a module of the user's; `None` for installed ones and ours."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None or name == "__main__" or name.partition(".")[0] in _OURS:
        return None
    path = Path(file)
    is_installed = any(part in _INSTALLED for part in path.parts)
    return None if is_installed or any(path.is_relative_to(library) for library in _LIBRARIES) else path


def _imports(module: ModuleType, path: Path) -> Iterator[str]:
    """Yield what `module` may import: packages on the way, modules, and names that may be modules."""
    yield from _with_parents(module.__name__)
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _absolute(module: ModuleType, node: ast.ImportFrom) -> str:
    """Return the module that `from <...> import` names; a level above the first goes up one package."""
    if not node.level:
        return node.module or ""
    package = (module.__package__ or "").split(".")
    parts = package[: len(package) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
