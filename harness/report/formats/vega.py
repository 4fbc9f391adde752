"""Vega's code for pages: bundled once on a machine, because that takes a second, and kept for the user."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import optional_package
from harness.records.files import make_folder, write_atomically

_EMBED = "window.acbenchEmbed = vegaEmbed;"
_BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]")
_FOR_SCRIPTS = re.compile(
    ' (?:(?:class|aria-[a-z]+|role|pointer-events)="[^"]*"|opacity="1"|transform="translate[(]0,0[)]")'
)
"""Attributes that nobody reads in a picture, or that change nothing: more than a third of its text."""
_WITHOUT_LENGTH = re.compile('<path d="(?:M0,0h0v0h0Z)?"[^>]*/>')
_FONT = ' font-family="sans-serif"'
_EMPTY = "<g></g>"
_PLACES = re.compile(' (?:d|transform|x1|x2|y1|y2)="[^"]*"')
_FINER = re.compile(r"(\.\d\d)\d+")
_DIGITS = 12


@cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script.

    It is read from `$XDG_CACHE_HOME/acbench` (`~/.cache/acbench`) where it is there, else left there for the
    next report; a folder that cannot be written is no error.

    Raises:
        ConfigError: the extra `report` is not installed.
    """
    converter = _converter()
    path = _place()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    bundle: str = converter.javascript_bundle(_EMBED)
    script = "(() => {" + bundle.replace("</script", "<\\/script") + "})();"
    with suppress(OSError):
        make_folder(path.parent)
        write_atomically(path, script)
    return script


def to_svg(specification: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the figure of a Vega-Lite specification, with its data, as SVG.

    Vega cuts long names between the halves of a character beyond 16 bits and fails; then others stand in.
    """
    try:
        return _drawn(specification, config)
    except ValueError:
        text = _BEYOND_16_BITS.sub("\N{REPLACEMENT CHARACTER}", json.dumps(specification, ensure_ascii=False))
        return _drawn(json.loads(text), config)


def _drawn(specification: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    try:
        svg: str = _converter().vegalite_to_svg(specification, config=config)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the Rust below, and no Exception
            raise
        raise ValueError(f"cannot be drawn: {error}") from error
    return _shortened(svg)


def _shortened(svg: str) -> str:
    """Return the same picture in fewer words: a font for all texts, nothing that shows nothing."""
    svg = _WITHOUT_LENGTH.sub("", _FOR_SCRIPTS.sub("", svg))
    svg = svg.replace(_FONT, "").replace("<svg", f"<svg{_FONT}", 1)
    while _EMPTY in svg:
        svg = svg.replace(_EMPTY, "")
    return _PLACES.sub(lambda place: _FINER.sub(r"\1", place[0]), svg)


def _converter() -> ModuleType:
    return optional_package("vl_convert", where="--format html,markdown", extra="report")


def _place() -> Path:
    """Return where the script of this version is kept; other code has another name."""
    source = f"{version('vl-convert-python')} {_EMBED} {Path(__file__).read_text(encoding='utf-8')}"
    digest = hashlib.sha256(source.encode()).hexdigest()[:_DIGITS]
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder, "acbench", f"vega-{digest}.js")
