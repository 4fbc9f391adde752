"""Vega is bundled once: the next report reads it, and a folder that nobody may write to is no error."""

from __future__ import annotations

from pathlib import Path

import pytest
import vl_convert

from harness.report.formats import vega


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the bundler by one that notes what it was asked for."""
    asked: list[str] = []

    def bundle(snippet: str) -> str:
        asked.append(snippet)
        return "let a = '</script>';"

    monkeypatch.setattr(vl_convert, "javascript_bundle", bundle)
    return asked


def _fresh() -> str:
    """Return the library as a new process would."""
    return vega.library.__wrapped__()


def test_the_second_process_reads_what_the_first_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundled: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = _fresh(), _fresh()
    assert first == second == "(() => {let a = '<\\/script>';})();"
    assert bundled == ["window.acbenchEmbed = vegaEmbed;"]
    assert [path.suffix for path in (tmp_path / "acbench").iterdir()] == [".js"]


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundled: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _fresh() == _fresh()
    assert len(bundled) == 2


def test_a_figure_has_no_words_that_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = (
        '<svg width="9"><g class="mark" transform="translate(0,0)"><path class="background" d="M0,0h0v0h0Z"/>'
        '<g><path d="" display="none"/></g></g><g transform="translate(1.12345,2)">'
        '<text opacity="1" font-family="sans-serif">1.234</text></g></svg>'
    )
    monkeypatch.setattr(vl_convert, "vegalite_to_svg", lambda _specification, config: drawn)  # noqa: ARG005
    assert vega.to_svg({}, {}) == (
        '<svg font-family="sans-serif" width="9"><g transform="translate(1.12,2)">'
        "<text>1.234</text></g></svg>"
    )
