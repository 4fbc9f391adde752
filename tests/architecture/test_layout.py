"""One idea, one file, one name; and every link in the documentation leads somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from strategies import ac_variants, chunk_variants, shard_variants

ROOT = Path(__file__).parents[2]
VARIANTS: dict[str, dict[str, type[Any]]] = {
    "ac": ac_variants,
    "chunk": chunk_variants,
    "shard": shard_variants,
}
NO_TEST_OF_ITS_OWN = {"none"}
"""What does nothing is tested by the laws and as the baseline of everything else."""

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("harness/**/*.md")]
    if path.is_file()
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=f"{kind}={name}") for kind, known in VARIANTS.items() for name in known],
)
def test_a_variant_is_a_module_a_configuration_and_a_test(kind: str, name: str) -> None:
    assert (ROOT / "strategies" / kind / f"{name}.py").is_file()
    assert (ROOT / "conf" / kind / f"{name}.yaml").is_file()
    if name not in NO_TEST_OF_ITS_OWN:
        assert (ROOT / "tests" / "strategies" / kind / f"test_{name}.py").is_file()


def test_every_group_with_a_choice_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    folders = [path for path in sorted((ROOT / "conf").iterdir()) if path.is_dir()]
    groups = [folder.name for folder in folders if len(list(folder.glob("*.yaml"))) > 1]
    assert [group for group in groups if f"`{group}`" not in readme and f"{group}=" not in readme] == []


@pytest.mark.parametrize("path", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_import_nothing(path: Path) -> None:
    """Names, not dotted paths: what a name means is found in one place. Launchers are Hydra's to find."""
    if path.parent != ROOT / "conf/hydra/launcher":
        assert "_target_" not in path.read_text("utf-8")
    assert isinstance(OmegaConf.load(path), DictConfig)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("package", ["acbench", "harness", "strategies", "hydra_plugins"])
def test_what_a_field_is_comes_first_in_its_description(package: str) -> None:
    """`store: store of the sweep`, not `store: of the sweep`."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for docstring in _docstrings(path)
        for line in re.findall(r"^ +[a-z_0-9, ]+: of .*$", docstring, flags=re.MULTILINE)
    ]
    assert found == []


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
