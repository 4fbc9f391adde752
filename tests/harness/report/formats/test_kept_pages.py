"""The pages below docs/results are what their records make of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools.readme import kept_sweeps
from harness.report.content.contents import document
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import load
from harness.report.formats.markdown import to_markdown, to_svg

README = Path(__file__).parents[4] / "README.md"


@pytest.mark.parametrize("kept", kept_sweeps(), ids=lambda path: path.stem)
def test_a_page_is_current(kept: Path) -> None:
    content, folder = document(load(kept)), kept.with_suffix("")
    assert (folder / "report.md").read_text("utf-8") == to_markdown(content, "figures"), (
        "run python -m docs.tools.readme"
    )
    figures = [item for item in content.items if isinstance(item, Figure)]
    assert {path.stem for path in (folder / "figures").iterdir()} == {figure.key for figure in figures}
    for figure in figures:
        assert (folder / "figures" / f"{figure.key}.svg").read_text("utf-8") == to_svg(figure)


def test_the_picture_of_the_readme_is_that_of_a_kept_sweep() -> None:
    text = README.read_text("utf-8")
    assert any(f"docs/results/{kept.stem}/figures/front.svg" in text for kept in kept_sweeps())
