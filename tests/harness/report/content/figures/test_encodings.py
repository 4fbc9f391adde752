"""A colour means the same in every figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from harness.report.content.figures import figures
from harness.report.content.figures.encodings import KIND_COLOURS, variant_colour
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import sweep_of
from harness.report.facts.workloads import workloads
from strategies import ac_variants
from tests.harness.records_fixture import experiment, record
from tests.harness.report.synthetic import sweep


@pytest.fixture(scope="module")
def drawn() -> list[Figure]:
    whole = sweep_of(sweep(130), name="demo")
    return [figure for workload in workloads(whole) for figure in figures(workload.sweep)]


def scales(spec: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield field and scale of every colour of a specification."""
    if isinstance(spec, Mapping):
        for channel in ("color", "fill"):
            if isinstance(spec.get(channel), Mapping) and spec[channel].get("scale"):
                yield spec[channel]["field"], spec[channel]["scale"]
        spec = list(spec.values())
    for each in spec if isinstance(spec, list | tuple) else ():
        yield from scales(each)


def test_a_colour_has_one_meaning(drawn: list[Figure]) -> None:
    found: dict[str, set[tuple[str, str]]] = {}
    for figure in drawn:
        for field, scale in scales(figure.spec):
            for name, colour in zip(scale["domain"], scale["range"], strict=True):
                found.setdefault(colour, set()).add((field, name))
    assert len(found) > len(KIND_COLOURS)
    assert {colour: meanings for colour, meanings in found.items() if len(meanings) > 1} == {}
    assert len({meaning for meanings in found.values() for meaning in meanings}) == len(found)


def test_every_variant_has_a_colour_of_its_own() -> None:
    whole = sweep_of([record(experiment(name)) for name in ac_variants], name="demo")
    scale = variant_colour(whole, [{"variant": name} for name in ac_variants])["scale"]
    assert len(set(scale["range"])) == len(ac_variants)
    alone = variant_colour(whole, [{"variant": "nested"}])["scale"]
    assert alone["range"] == [scale["range"][scale["domain"].index("nested")]]
