"""Programs as text that a person reads: the code that runs, region by region."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

_FREED = re.compile(r";  [\w\s=]+ = None(?=$|  #)")
_INDENT = "    "


def code_text(code: fx.GraphModule) -> str:
    """Return the code of a forward, each region as a function inside the one that calls it.

    What frees variables and what names submodules is left out; behind each line stand dtype and shape.
    """
    return "\n".join(_lines("forward", code))


def _lines(name: str, code: fx.GraphModule) -> Iterator[str]:
    """Yield a graph as a function of Python, the graphs inside it first."""
    inputs = [node.name for node in code.graph.nodes if node.op == "placeholder"]
    yield f"def {name}({', '.join(['self', *inputs])}):"
    for region, inner in code.named_children():
        body = inner if isinstance(inner, fx.GraphModule) else getattr(inner, "code", None)
        if isinstance(body, fx.GraphModule):
            yield from (f"{_INDENT}{line}" if line else "" for line in _lines(region, body))
            yield ""
    yield from (f"{_INDENT}{line}" for line in _statements(code.graph))


def _statements(graph: fx.Graph) -> Iterator[str]:
    attributes = {node.name: f"self.{node.target}" for node in graph.nodes if node.op == "get_attr"}
    shapes = {node.name: _shape(node.meta.get("val")) for node in graph.nodes}
    source = graph.python_code("self").src.splitlines()
    for line in (each.strip() for each in source if each.startswith(_INDENT) and each.strip()):
        made, equals, does = _FREED.sub("", line).partition(" = ")
        if attributes.get(made) == does:
            continue
        statement = made + equals + does.replace(" = ", "=")
        for name, attribute in attributes.items():
            statement = re.sub(rf"(?<=[( ]){name}(?=[,.)])", attribute, statement)
        yield f"{statement}  # {shapes[made]}" if shapes.get(made) else statement


def _shape(value: Any) -> str | None:
    if not isinstance(value, Tensor):
        return None
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
