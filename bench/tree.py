"""The shape of the source tree: rooms, arrows between them, length, documentation, branching.

A room is what a listing of `harness/` or `strategies/` shows: a folder, or a file directly below. An arrow
is an import from one room to another. A chain is a path of imports from module to module. Imports for type
checkers alone (`if TYPE_CHECKING`) are not counted: they never run.

With `--entered` two trials run, and functions are counted that their processes enter, lambdas left out.

    python -m bench.tree --before ../other_checkout --entered
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grimp
from rich.console import Group
from rich.table import Table

from bench.entered import Entered, entered
from bench.output import parser, publish
from bench.table import Column, table_of

_PACKAGES = ("harness", "strategies")
_SOURCES = (*_PACKAGES, "hydra_plugins")
_BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case,
)  # fmt: skip
_MANY_BRANCHES = 10
_TRIALS = {"full": ("ac=full",), "budget": ("ac=budget", "ac.fraction=0.6")}
"""Trials of the default model whose functions are counted; a tracker would add those of an extra."""
_SHOWN_ROOMS = 12
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeFigures:
    """Figures of one checkout.

    Fields:
        rooms: folders and files directly below the packages.
        arrows: pairs of rooms of which one imports the other.
        circles: modules that import themselves through others.
        room_circles: rooms that do.
        longest_chain: modules on the longest path of imports.
        source_lines: of `harness/`, `strategies/` and `hydra_plugins/`.
        statements_percent: statements a hundred of these lines, docstrings left out.
        documented_percent: lines of docstrings and comments among them.
        functions: of all source files.
        branching_percent: functions with more than ten branches, comprehensions and `and`, `or` counted.
        readme_lines: of README.md.
        readme_columns: its longest line outside tables, images and code.
        bench_commands: files of `bench/` that run as a program.
        bench_lines, test_lines: of all Python files of these folders.
        results_bytes: of the kept results in `docs/results/`.
    """

    rooms: int
    arrows: int
    circles: int
    room_circles: int
    longest_chain: int
    source_lines: int
    statements_percent: float
    documented_percent: float
    functions: int
    branching_percent: float
    readme_lines: int
    readme_columns: int
    bench_commands: int
    bench_lines: int
    test_lines: int
    results_bytes: int


def main() -> int:
    """Print the figures, those of another checkout beside them; return 0."""
    made = parser(__doc__, "tree")
    made.add_argument("--before", type=Path, help="another checkout")
    made.add_argument("--entered", action="store_true", help="count the functions of two trials, too")
    arguments = made.parse_args()
    roots = {"after": Path(__file__).parents[1]}
    if arguments.before is not None:
        roots = {"before": arguments.before.resolve(), **roots}
    trials = _TRIALS if arguments.entered else {}
    found = {name: {trial: _entered(root, trial) for trial in trials} for name, root in roots.items()}
    figures = {name: asdict(_figures_of_checkout(root)) for name, root in roots.items()}
    for name, trial in product(roots, trials):
        figures[name][f"files_entered_{trial}"] = found[name][trial].files
        figures[name][f"functions_entered_{trial}"] = found[name][trial].functions
    rooms = [_rooms_table(trial, found) for trial in trials]
    publish(
        Group(_table(figures), *rooms),
        arguments.out,
        protocol={"sources": _SOURCES, "trials": trials},
        results=figures,
    )
    return 0


def _entered(root: Path, trial: str) -> Entered:
    with TemporaryDirectory() as folder:
        words = ["-m", "harness", *_TRIALS[trial], "tracker=none", f"outputs_dir={folder}"]
        return entered(root, words, _SOURCES)


def _table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    def of(checkout: str) -> Column:
        return lambda name: f"{figures[checkout][name]:,}"

    columns: dict[str, Column] = {"figure": str} | {checkout: of(checkout) for checkout in figures}
    return table_of(figures["after"], columns, title="Figures of the source tree")


def _rooms_table(trial: str, found: Mapping[str, Mapping[str, Entered]]) -> Table:
    def of(checkout: str) -> Column:
        return lambda room: f"{found[checkout][trial].rooms.get(room, 0)}"

    rooms = list(found["after"][trial].rooms)[:_SHOWN_ROOMS]
    columns: dict[str, Column] = {"folder": str} | {checkout: of(checkout) for checkout in found}
    return table_of(rooms, columns, title=f"Functions entered by {' '.join(_TRIALS[trial])}")


def _figures_of_checkout(root: Path) -> TreeFigures:
    imports = _imports(root)
    between = _between_rooms(imports)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in _files(root)]
    lines = [path.read_text(encoding="utf-8").splitlines() for path in _files(root)]
    branches = [_branches(node) for tree in trees for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    source_lines = sum(map(len, lines))
    documented = sum(map(_docstring_lines, trees)) + sum(
        line.lstrip().startswith("#") or "  # " in line for each in lines for line in each
    )
    readme = (root / "README.md").read_text(encoding="utf-8").splitlines()
    return TreeFigures(
        rooms=len(between),
        arrows=sum(map(len, between.values())),
        circles=_circles(imports),
        room_circles=_circles(between),
        longest_chain=_longest_chain(imports),
        source_lines=source_lines,
        statements_percent=round(100 * sum(map(_statements, trees)) / source_lines, 1),
        documented_percent=round(100 * documented / source_lines, 1),
        functions=len(branches),
        branching_percent=round(100 * sum(count > _MANY_BRANCHES for count in branches) / len(branches), 2),
        readme_lines=len(readme),
        readme_columns=max(len(line) for line in readme if not line.startswith(("|", "!", "[!"))),
        bench_commands=sum('if __name__ == "__main__"' in text for text in _texts(root / "bench")),
        bench_lines=sum(text.count("\n") for text in _texts(root / "bench")),
        test_lines=sum(text.count("\n") for text in _texts(root / "tests")),
        results_bytes=sum(path.stat().st_size for path in (root / "docs" / "results").rglob("*.*")),
    )


def _files(root: Path) -> list[Path]:
    return sorted(path for package in _SOURCES for path in (root / package).rglob("*.py"))


def _texts(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]


def _statements(tree: ast.AST) -> int:
    """Return the number of statements, without docstrings and other strings that stand alone."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


def _between_rooms(imports: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Return for each room the other rooms that it imports."""
    between: dict[str, set[str]] = {_room(module): set() for module in imports}
    for importer, others in imports.items():
        between[_room(importer)] |= {_room(imported) for imported in others} - {_room(importer)}
    return between


def _imports(root: Path) -> dict[str, set[str]]:
    """Return `{module: modules it imports}`; a package that only has others below it is no module here."""
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
        del sys.modules[name]
    try:
        graph = grimp.build_graph(*_PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    finally:
        sys.path.remove(str(root))
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _branches(function: ast.AST) -> int:
    """Return McCabe's number of a function, nested functions left out and boolean operators counted."""
    own = [*_own_nodes(function)]
    operators = sum(len(node.values) - 1 for node in own if isinstance(node, ast.BoolOp))
    return 1 + operators + sum(isinstance(node, _BRANCHES) for node in own)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)


def _docstring_lines(tree: ast.AST) -> int:
    found = [node.body[0] for node in ast.walk(tree) if isinstance(node, _DOCUMENTED) and node.body]
    found += [
        statement  # the docstring of a constant
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef)
        for statement in node.body[1:]
    ]
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in found
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _longest_chain(imports: Mapping[str, set[str]]) -> int:
    @cache
    def depth(module: str) -> int:
        return 1 + max((depth(other) for other in imports[module]), default=0)

    return max(map(depth, imports))


def _circles(imports: Mapping[str, set[str]]) -> int:
    """Return how many modules reach themselves."""
    return sum(module in _reached(imports, module) for module in imports)


def _reached(imports: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    pending = list(imports[start])
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending.extend(imports[module])
    return found


if __name__ == "__main__":
    sys.exit(main())
