"""The user's own source files behind a module: what it imports, and what that imports."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

_OURS = ("harness", "strategies", "hydra_plugins")
_INSTALLED = ("site-packages", "dist-packages")
_DIGITS = 16
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
            waiting += _imported_names(name, path)
    return tuple(sorted(set(found.values())))


def digest_of(module: str) -> str:
    """Return the start of the SHA-256 of a module and of the user's modules that it imports, 16 digits.

    Nothing runs: modules are looked for where an import would find them, in the working folder too. A module
    that is nowhere has no content; whoever imports it is told.
    """
    digest, seen, waiting = hashlib.sha256(), set[str](), [module]
    while waiting:
        name = waiting.pop()
        path = None if name in seen else _found_file(name)
        seen.add(name)
        if path is None or (name != module and not _is_users(name, path)):
            continue
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        waiting += sorted(_imported_names(name, path), reverse=True)
    return digest.hexdigest()[:_DIGITS]


def _found_file(name: str) -> Path | None:
    """Return the file of a module, without importing it or what holds it; `None` where it has none."""
    places, begun = [*sys.path, str(Path.cwd())], ""
    spec = None
    for part in name.split("."):
        begun = f"{begun}.{part}" if begun else part
        spec = PathFinder.find_spec(begun, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    is_file = spec is not None and spec.has_location and spec.origin is not None
    return Path(str(spec.origin)) if spec is not None and is_file else None


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
    if file is None or name == "__main__":
        return None
    path = Path(file)
    return path if _is_users(name, path) else None


def _is_users(name: str, path: Path) -> bool:
    """Return whether a module is neither ours, nor installed, nor of the standard library."""
    is_installed = any(part in _INSTALLED for part in path.parts)
    is_library = any(path.is_relative_to(library) for library in _LIBRARIES)
    return name.partition(".")[0] not in _OURS and not is_installed and not is_library


def _imported_names(module: str, path: Path) -> Iterator[str]:
    """Yield what a module may import: packages on the way, modules, and names that may be modules."""
    yield from _with_parents(module)
    if path.suffix != ".py":
        return
    try:
        parsed = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it is told
        return
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module if path.stem == "__init__" else module.rpartition(".")[0], node)
            yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _absolute(package: str, node: ast.ImportFrom) -> str:
    """Return the module that `from <...> import` in a package names; a level above the first goes up one."""
    if not node.level:
        return node.module or ""
    names = package.split(".")
    parts = names[: len(names) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
