"""What variants do to one step, measured in this process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acbench
from acbench.html import html_table
from strategies import ac_variants
from strategies.ac.budget import Budget
from strategies.ac.full import Full
from strategies.ac.selective_layer import SelectiveLayer
from tests.gallery.outside.freed_nothing import Tagger

BATCH = (torch.ones(256, 16),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return output


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def nothing(model: nn.Module) -> nn.Module:
    return model


def detached(model: nn.Module) -> nn.Module:
    """Change the mathematics."""
    model.get_submodule("blocks.0").register_forward_hook(lambda _module, _inputs, output: output.detach())
    return model


def test_variants_are_compared_here() -> None:
    table = acbench.compare(Stack, BATCH, ["none", "full", nothing, detached], pairs=0)
    assert [(row.variant, row.verdict) for row in table] == [
        ("none", "neutral"),
        ("full", "neutral"),
        ("nothing", "inert"),
        ("detached", "differs"),
    ]
    plain, full, idle, wrong = table
    assert plain.saved_bytes == idle.saved_bytes > full.saved_bytes
    assert (plain.recomputed_flops, idle.recomputed_flops) == (0, 0)
    assert full.recomputed_flops == 3 * 2 * 256 * 16 * 64  # without the last product of a block
    assert full.peak_bytes < plain.peak_bytes
    assert wrong.reason
    assert table["full"] is full
    assert str(table).splitlines()[2].startswith("full ")
    assert "<td style='text-align:left'>full</td>" in table._repr_html_()


def test_a_checkpoint_that_frees_nothing_is_inert() -> None:
    batch = (torch.sin(torch.arange(400.0)).view(2, 50, 4),)
    variants = {"idle": Full(module_classes=("Linear",)), "nothing promised": ac_variants["none"]()}
    idle, promised = acbench.compare(Tagger, batch, variants, pairs=0)
    assert (idle.verdict, idle.reason.partition(":")[0]) == ("inert", "frees nothing")
    assert (promised.verdict, promised.reason) == ("neutral", "")


def test_what_is_the_plain_models_is_found_once() -> None:
    made = []

    def make() -> nn.Module:
        made.append(1)
        return Stack()

    acbench.compare(make, BATCH, ["none", "full", "selective_op"], pairs=0)
    once = 1 + 2 + 1  # its blocks, two that are to be alike, the one that is measured
    of_each = 2 + 1  # the two of a proof, the one that is measured
    assert len(made) == once + 2 * of_each


def test_steps_are_timed_in_turns() -> None:
    (full,) = acbench.compare(Stack, BATCH, {"mine": Full(layers_fqn="blocks")}, pairs=1)
    assert full.variant == "mine"
    assert full.ratio is not None
    assert full.ratio > 0


def test_one_variant_is_measured() -> None:
    plain, full = (acbench.measure(Stack, BATCH, variant) for variant in ("none", "full"))
    assert plain[0].peak_bytes > full[0].peak_bytes
    assert (plain[1].recomputed_flops, full[1].recomputed_flops) == (0, 3 * 2 * 256 * 16 * 64)


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        pytest.param("full", "variants: must be a list, got 'full'; write ['full']", id="a word"),
        pytest.param(["ful"], "variants: unknown 'ful'; options: ", id="no such variant"),
        pytest.param(
            ["budget"], "variants: 'budget' alone says too little: ac: give exactly one of ", id="a number"
        ),
    ],
)
def test_arguments_are_refused(variants: Any, message: str) -> None:
    with pytest.raises(acbench.ConfigError) as refused:
        acbench.compare(Stack, BATCH, variants, pairs=0)
    assert str(refused.value).startswith(message)


class Shared(nn.Module):
    """One block that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))  # type: ignore[no-any-return]


WITHOUT_BLOCKS: dict[str, tuple[Any, str]] = {
    "a linear": (partial(nn.Linear, 16, 16), "put its stages into modules"),
    "a shared block": (
        Shared,
        "pass acbench.strategies['full'](module_classes=['Block']) for blocks of that class",
    ),
}


@pytest.mark.parametrize(("make", "remedy"), WITHOUT_BLOCKS.values(), ids=WITHOUT_BLOCKS)
def test_a_model_without_blocks_is_refused(make: Any, remedy: str) -> None:
    with pytest.raises(acbench.ConfigError) as refused:
        acbench.compare(make, BATCH, ["full"], pairs=0)
    assert (
        str(refused.value) == f"variants: 'full' needs blocks, and no module of the model repeats; {remedy}"
    )


class ChecksItself(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_step_that_no_plan_follows_is_a_row_with_its_reason() -> None:
    (row,) = acbench.compare(ChecksItself, BATCH, [Budget(layers_fqn="blocks", fraction=0.9)], pairs=0)
    assert (row.verdict, row.peak_bytes) == ("unverified", 0)
    assert row.reason == (
        "ac: 'blocks.0' runs inside of a checkpoint of the model's own, which recomputes what a plan would "
        "keep; take that checkpoint away"
    )


def _with_a_batch() -> Any:
    return Stack(), BATCH


@pytest.mark.parametrize("variant", ["none", "full"])
def test_a_factory_of_something_else_is_refused(variant: str) -> None:
    for asked in (
        partial(acbench.measure, variant=variant),
        partial(acbench.compare, variants=[variant], pairs=0),
    ):
        with pytest.raises(acbench.ConfigError, match=r"^make: must return an nn\.Module, got tuple$"):
            asked(_with_a_batch, BATCH)


def test_text_of_a_table_is_escaped() -> None:
    assert "<script>" not in html_table(["<script>"], [["<script>"]], title="<script>", marked=0)


def test_a_plan_at_the_peak_of_a_variant_is_made_for_the_step_that_is_measured() -> None:
    every_second = SelectiveLayer(layers_fqn="blocks", ac_freq=2)
    plain, *others = acbench.compare(Stack, BATCH, ["none", "full", every_second], pairs=0)
    assert plain.points_above is None
    for other in others:
        share = other.peak_bytes / plain.peak_bytes
        plan = Budget(layers_fqn="blocks", fraction=share, objective="flops")
        (planned,) = acbench.compare(Stack, BATCH, {"planned": plan}, pairs=0)
        assert planned.verdict == "neutral"
        assert planned.peak_bytes <= other.peak_bytes
        assert planned.recomputed_flops <= other.recomputed_flops
        assert planned.points_above is not None
        assert other.points_above is not None
        assert 0 <= planned.points_above <= other.points_above
