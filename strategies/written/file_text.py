"""The text of a written file: a table, and the code that reads it, of modules in `runtime`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap

_RUNTIME = Path(__file__).with_name("runtime")
_ROOM = "strategies.written"
_Imports = ast.Import | ast.ImportFrom
_WIDTH = 110
_FEW = 2
"""Consecutive blocks that are listed one by one."""
_PLAIN = re.compile(r"[\w.]+")
_MAIN = """

if __name__ == "__main__":
    main(*sys.argv[1:])
"""
_USE = """\
    from {name} import apply
    model = apply(model)        # before FSDP or DDP wraps it; it needs torch alone

`python {name}.py --check module:function` proves it for the model that the function returns, alone or in
(model, inputs, loss_fn), on the device at hand."""
_OF_RULES = """\
A rule is `module:family`: the result of that module's operator stays. `module@1` is its second call, `#1` its
second operator of the family. All else of the blocks runs again in backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRules:
    """The rules of a written file for the operators of a block that cost FLOPs.

    Fields:
        keep: rules of those whose results stay for backward.
    """

    keep: tuple[str, ...] = ()
    again: tuple[str, ...] = ()


def recomputing_file(blocks: Sequence[str], *, title: str, name: str = "apply_ac") -> str:
    """Return a file that runs whole blocks again in backward.

    Args:
        title: first line of the file: what it does to which model.
        name: the file's name without its ending, as it names itself.
    """
    return _file(("called_again", "run_again"), {"BLOCKS": _names(blocks, 0)}, f"{title}\n\n{_USE}", name)


def offloading_file(blocks: Sequence[str], *, title: str, name: str = "apply_ac") -> str:
    """Return a file that keeps in host memory what blocks save for backward; see `recomputing_file`."""
    return _file(("moved_to_host",), {"BLOCKS": _names(blocks, 0)}, f"{title}\n\n{_USE}", name)


def rules_file(
    rules: Mapping[str, BlockRules], *, title: str, name: str = "apply_ac", remarks: str = ""
) -> str:
    """Return a file that runs blocks again but for the operators that rules keep.

    Args:
        rules: by FQN of the block.
        title: first line of the file: what it does to which model.
        name: the file's name without its ending, as it names itself.
        remarks: what it does not do of what it was made from, a paragraph.
    """
    rows: dict[BlockRules, list[str]] = {}
    for fqn, each in rules.items():
        rows.setdefault(each, []).append(fqn)
    lines = ["["]
    for each, fqns in rows.items():
        columns = (_names(fqns, 8), *(_wrapped(_quoted(of), 8) for of in (each.keep, each.again)))
        lines += [
            "    (  # blocks, what stays, what runs again",
            *(f"        {text}," for text in columns),
            "    ),",
        ]
    table = "\n".join([*lines, "]"])
    said = "\n\n".join(each for each in (title, _USE, _OF_RULES, remarks) if each)
    return _file(("called_again", "kept_results"), {"RULES": table}, said, name)


def _file(parts: Sequence[str], tables: Mapping[str, str], docstring: str, name: str) -> str:
    """Return the code of parts, with what finds the blocks and what proves it, as one file."""
    sources = [
        (_RUNTIME / f"{each}.py").read_text(encoding="utf-8") for each in ("found_blocks", *parts, "proof")
    ]
    constants = {"NAME": f'"{name}"', **tables}
    pattern = re.compile(rf"^({'|'.join(constants)})(: .*)? = .*\n+", re.MULTILINE)
    code = "\n\n\n".join(pattern.sub("", _after_imports(source)) for source in sources)
    table = "\n".join(f"{name} = {value}" for name, value in constants.items())
    head = f'"""{docstring.format(name=name)}\n"""\n\n{_imports(sources)}\n\n{table}\n'
    # what it says to the tools of this project is of no use elsewhere
    text = re.sub(r"  # (type|noqa)\b.*$", "", f"{head}\n\n{code}{_MAIN}", flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text)
    compile(text, name, "exec", dont_inherit=True)
    return text


def _after_imports(source: str) -> str:
    last = max(each.end_lineno or 0 for each in ast.parse(source).body if isinstance(each, _Imports))
    return "\n".join(source.splitlines()[last:]).strip("\n")


def _imports(sources: Iterable[str]) -> str:
    """Return the imports of modules together, but those from this room: standard library, then torch."""
    whole: set[str] = set()
    parts: dict[str, set[str]] = {}
    for node in (node for source in sources for node in ast.parse(source).body):
        if isinstance(node, ast.Import):
            whole |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(_ROOM):
            parts.setdefault(str(node.module), set()).update(each.name for each in node.names)
    lines = {module: f"import {module}" for module in sorted(whole)}
    lines |= {
        f"{module} ": f"from {module} import {', '.join(sorted(parts[module]))}" for module in sorted(parts)
    }
    groups = [
        "\n".join(
            line
            for module, line in lines.items()
            if (module.partition(".")[0].strip() == "torch") is is_torch
        )
        for is_torch in (False, True)
    ]
    return "\n\n".join(groups)


def _quoted(words: Iterable[str]) -> list[str]:
    return [json.dumps(word) for word in words]


def _names(fqns: Sequence[str], depth: int) -> str:
    """Return a list of FQNs as code: consecutive numbers of a container as one expression."""
    parts: list[str] = []
    for prefix, group in groupby(enumerate(fqns), key=_run_of):
        members = [fqn for _, fqn in group]
        first, last = (int(each.rpartition(".")[2]) if prefix else 0 for each in (members[0], members[-1]))
        if len(members) > _FEW and prefix:
            numbers = f"{first}, {last + 1}" if first else f"{last + 1}"
            names = f'f"{prefix[0]}.{{n}}" for n in range({numbers})'
            parts.append(names if len(members) == len(fqns) else f"*({names})")
        else:
            parts += _quoted(members)
    return _wrapped(parts, depth)


def _run_of(place_and_fqn: tuple[int, str]) -> tuple[str, int] | None:
    """Return what consecutive members of a container have in common; `None` for what has no number."""
    place, fqn = place_and_fqn
    container, _, number = fqn.rpartition(".")
    is_plain = container and number.isdecimal() and str(int(number)) == number and _PLAIN.fullmatch(container)
    return (container, int(number) - place) if is_plain else None


def _wrapped(parts: Sequence[str], depth: int) -> str:
    """Return a list as code, in lines of the usual width where it needs several."""
    line = f"[{', '.join(parts)}]"
    if len(line) + depth < _WIDTH:
        return line
    space = " " * depth
    lines = wrap(f"{', '.join(parts)},", _WIDTH - depth - 4, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["[", *(f"{space}    {each}" for each in lines), f"{space}]"])
