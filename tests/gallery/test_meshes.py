"""Defects of meshes: each is silent in a run, and the proof names the rank and what differs first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.check import NotNeutral, assert_neutral
from harness.models.base import Batch
from harness.models.llama import LlamaSpec
from harness.models.parts import context_attention
from harness.records.parity_result import Parity
from harness.trial import assemble
from tests.gallery import meshes
from tests.gallery.flips import flipped
from tests.gallery.parts import checkpointed, rows
from tests.parity import cases
from tests.rank_pool import RankPool

_PAGE = Path(__file__).parents[2] / "docs" / "gallery" / "meshes.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class UncutPositions(LlamaSpec):
    """Each part of a sequence begins at position 0."""

    def sequence_part(self, batch: Batch, part: int, parts: int) -> Batch:
        cut = LlamaSpec.sequence_part(self, batch, part, parts)
        tokens, positions = cut.inputs
        return dataclasses.replace(cut, inputs=(tokens, positions - positions[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class NormsOfParts(LlamaSpec):
    """A plan that forgets the norms: each rank has their gradients of its own part."""

    def split_plan(self, *, sp: bool, loss_parallel: bool) -> dict[str, str]:
        plan = LlamaSpec.split_plan(self, sp=sp, loss_parallel=loss_parallel)
        return {name: style for name, style in plan.items() if not name.endswith("attention_norm")}


@contextmanager
def _stale_keys() -> Iterator[None]:
    with mock.patch.object(context_attention, "_passed_on", lambda _ring, tensor: tensor.clone()):
        yield


@contextmanager
def _stale_keys_in_backward() -> Iterator[None]:
    backward = context_attention._RingAttention.backward

    def stale(ctx: Any, gradient: torch.Tensor) -> Any:
        with _stale_keys():
            return backward(ctx, gradient)

    with mock.patch.object(context_attention._RingAttention, "backward", staticmethod(stale)):
        yield


@contextmanager
def _unreduced() -> Iterator[None]:
    with mock.patch.object(assemble, "distribute", lambda model, *_: model):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """A mistake on a mesh.

    Fields:
        title: as the page has it.
        mesh: one of `cases.MESHES`.
        says: begin of the first difference, and words in it.
        factory: function of `ac=python` that makes it in recomputation; empty where others make it.
        family: model that makes it.
        around: makes a scope in which the code makes it.
    """

    title: str
    mesh: str
    says: tuple[str, str]
    factory: str = ""
    family: type[LlamaSpec] = LlamaSpec
    around: Callable[[], Any] = nullcontext


_DENSE = "against the dense model"
DEFECTS: Mapping[str, Defect] = {
    "uncut": Defect(
        title="Every part of a sequence begins at position 0",
        mesh="cp2_gather",
        family=UncutPositions,
        says=("parity: output", _DENSE),
    ),
    "stale": Defect(
        title="A ring attends to its own keys at every turn",
        mesh="cp2_ring",
        around=_stale_keys,
        says=("parity: output", _DENSE),
    ),
    "stale_backward": Defect(
        title="A ring's backward reads the keys of the last turn",
        mesh="cp2_ring",
        around=_stale_keys_in_backward,
        says=("parity: gradient of", _DENSE),
    ),
    "unreduced": Defect(
        title="Each rank keeps the gradients of its own part",
        mesh="cp2_ring",
        around=_unreduced,
        says=("parity: gradient of", _DENSE),
    ),
    "partial": Defect(
        title="A sum that no rank has added up is read as a whole gradient",
        mesh="sp_tp2",
        family=NormsOfParts,
        says=("parity: gradient of 'layers.1.attention_norm.weight'", _DENSE),
    ),
    "order": Defect(
        title="One rank's recomputation begins its collectives in another order",
        mesh="cp2_gather",
        factory=f"{meshes.__name__}:gathers_values_first",
        says=("parity: gradient of", "layers.1."),
    ),
}


def _parity(rank: int, name: str) -> Parity:
    defect = DEFECTS[name]
    variant = ("python", {"factory": defect.factory}) if defect.factory else ("full", {})
    case = cases.experiment(
        model="llama", mesh=cases.MESHES[defect.mesh], variant=variant[0], options=variant[1]
    )
    fields = {field.name: getattr(case.model, field.name) for field in dataclasses.fields(LlamaSpec)}
    case = dataclasses.replace(case, model=defect.family(**fields))
    with cases.forgotten(), defect.around():
        return cases.parity(rank, case)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_a_mesh_is_named(pool2: RankPool, name: str) -> None:
    defect = DEFECTS[name]
    found = pool2.run(_parity, name)
    # what forward makes wrong is wrong in the twin too
    assert all(parity.first is None for parity in found) is not bool(defect.factory)
    # the first part reads no other, so that rank 0 may have fewer differences
    first = next(iter(found[-1].differences()))
    assert first.startswith(defect.says[0])
    assert defect.says[1] in first


FLIPS = {
    "Recomputation flips a router, and ranks tell each other new sizes": ("ep2", False),
    "Recomputation flips a router, and sizes of forward are kept": ("ep2", True),
    "Recomputation flips a router under a capacity": ("ep2_capacity", False),
}
"""Titles, with the mesh and with whether a recomputation takes the sizes of forward."""


@pytest.mark.parametrize("variant", ["full", "nested"])
@pytest.mark.parametrize("title", FLIPS)
def test_tokens_that_change_experts_are_found_with_router_and_rank(
    pool2: RankPool, title: str, variant: str
) -> None:
    mesh, is_kept = FLIPS[title]
    options = {"levels": [2]} if variant == "nested" else {}
    case = cases.experiment(model="moe", mesh=cases.MESHES[mesh], variant=variant, options=options)
    found = pool2.run(flipped, case, is_kept)
    changed = [{each.router: each.changed_tokens for each in routings} for routings in found]
    names = [f"layers.{block}.feed_forward.router" for block in range(2)]
    assert changed == [dict.fromkeys(names, 0), {names[0]: 0, names[1]: 2}]
    for routings in found:
        assert all(each.tokens == 32 and each.margin is not None and each.margin > 0 for each in routings)


_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
_IN_STAGES = [
    pytest.param(
        *row,
        id=", ".join(map(str, row)),
        marks=() if row[1:] == ("1f1b", "full") and "told" in row[0] else [pytest.mark.matrix],
    )
    for row in itertools.product(
        ["sizes told anew", "sizes kept", "capacity"], _SCHEDULES, ["full", "nested"]
    )
]


@pytest.mark.parametrize(("design", "schedule", "variant"), _IN_STAGES)
def test_micro_batches_in_flight_are_told_apart(
    pool4: RankPool, design: str, schedule: str, variant: str
) -> None:
    mesh = cases.in_stages(cases.MESHES["ep2_capacity" if design == "capacity" else "ep2"], schedule)
    # a region for each block: `_sizes_kept` gives sizes back in the other order of blocks
    options = {"levels": [4 // mesh.stages]} if variant == "nested" else {}
    case = cases.of_four_blocks(
        cases.experiment(
            model="moe", mesh=mesh, variant=variant, options=options, batch_size=8, microbatches=4
        )
    )
    found = pool4.run(flipped, case, design == "sizes kept")
    changed = [{each.router: each.changed_tokens for each in routings} for routings in found]
    routers = {
        stage: [f"layers.{block}.feed_forward.router" for block in blocks]
        for stage, blocks in enumerate(
            [(0, 1), (2, 3)] if mesh.stages == mesh.pp else [(0,), (1,), (2,), (3,)]
        )
    }
    for rank, tokens in enumerate(changed):
        own = [name for stage in mesh.stages_of(mesh.coordinate(rank).pp) for name in routers[stage]]
        assert tokens == {name: 2 * (rank % 2) * name.startswith("layers.1.") for name in own}


def test_kept_choices_do_not_change(pool2: RankPool) -> None:
    case = cases.experiment(
        model="moe", mesh=cases.MESHES["ep2"], variant="selective_op", options={"save_ops": ("topk",)}
    )
    for routings in pool2.run(flipped, case, False):
        assert [each.changed_tokens for each in routings] == [0, 0]


_CUT = "Positions cut in place around forward, and put back before backward"


def test_positions_cut_in_place_are_named() -> None:
    with pytest.raises(NotNeutral) as raised:
        assert_neutral(meshes.CutsPositions, rows(), checkpointed, steps=1)
    found = raised.value.found
    assert (found.verdict, found.first and found.first["part"]) == ("differs", "hides_error")
    assert "changed since forward read it: blocks.0.positions" in str(found)


def test_the_page_has_every_defect() -> None:
    page = _PAGE.read_text("utf-8")
    titles = [*(defect.title for defect in DEFECTS.values()), *FLIPS, _CUT]
    assert [title for title in titles if title not in page] == []
