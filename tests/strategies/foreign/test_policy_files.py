"""Policies of others: each file keeps what a variant of ours with the same words keeps, or is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies import Strategy, StrategyError
from strategies.ac.file import File
from strategies.ac.none import NoCheckpoints
from strategies.ac.selective_op import SelectiveOp
from strategies.ac.torch_remat import TorchRemat
from strategies.regions.blocks import AbsentBlock
from tests.strategies.installed import ABSENT
from tests.strategies.meters import Measured, measure
from tests.strategies.toys import Step, Toy, differences, toy, train_step

REMAT = pytest.mark.skipif(
    "torch_remat" in ABSENT, reason="torch-remat is not installed: pip install 'acbench[remat]'"
)

POLICY = """
import torch
from torch.utils.checkpoint import CheckpointPolicy

SAVED = {torch.ops.aten.addmm.default}

def policy_fn(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
"""
"""As the documentation of torch has it."""

TITAN = (
    "layers.*.up :: aten.addmm.default | layers.*.out::matmul  # as torchtitan's full_recompute_save_ops\n"
)

ALIKE: dict[str, tuple[str, str, Strategy]] = {
    "a policy of torch": (
        "mine.py",
        POLICY,
        SelectiveOp(layers_fqn="layers", save_ops=("aten.addmm.default",)),
    ),
    "selectors": ("theirs.txt", TITAN, SelectiveOp(layers_fqn="layers", keep=("up", "out"))),
    "names without modules": (
        "save_list",
        "aten.addmm.default\n\n# all products\naten.bmm.default\n",
        SelectiveOp(layers_fqn="layers", save_ops=("aten.addmm.default", "aten.bmm.default")),
    ),
    "operators that the block itself calls": (
        "theirs.txt",
        "layers.?::aten.addmm.default\nlayers.[01]::aten.bmm.default\nlayers.2::aten.bmm.default",
        SelectiveOp(layers_fqn="layers", save_ops=("aten.bmm.default",)),
    ),
}


def of_file(tmp_path: Path, name: str, text: str) -> File:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return File(path=str(path), layers_fqn="layers")


def measured(strategy: Strategy) -> Measured:
    return measure(strategy.apply(toy()), torch.arange(8).view(2, 4))


@cache
def plain_step() -> Step:
    return train_step(toy())


@pytest.mark.parametrize(("name", "text", "variant"), ALIKE.values(), ids=ALIKE)
def test_a_file_keeps_what_its_words_say(tmp_path: Path, name: str, text: str, variant: Strategy) -> None:
    strategy = of_file(tmp_path, name, text)
    assert measured(strategy) == measured(variant)
    assert differences(plain_step(), train_step(strategy.apply(toy()))) == []


@pytest.mark.parametrize("answer", ["'MUST_SAVE'", "None", "1"])
def test_a_policy_that_answers_neither_a_policy_nor_a_bool_is_refused(tmp_path: Path, answer: str) -> None:
    text = f"def policy_fn(ctx, op, *args, **kwargs):\n    return {answer}\n"
    strategy = of_file(tmp_path, "policy.py", text)
    with pytest.raises(StrategyError, match=rf"ac.path: the policy answers {answer} for aten"):
        measured(strategy)


@REMAT
def test_regions_of_torch_remat(tmp_path: Path) -> None:
    text = "layers.0: [up]\nlayers.1: [up]  # lost: nothing\nlayers.2: [up]\n"
    strategy = of_file(tmp_path, "regions.yaml", text)
    assert measured(strategy) == measured(TorchRemat(layers_fqn="layers", save_regions=("up",)))
    assert differences(plain_step(), train_step(strategy.apply(toy()))) == []
    some = of_file(tmp_path, "some.yml", "layers.1: [up]\n")
    costs = [measured(each).backward_flops for each in (NoCheckpoints(), some, strategy)]
    assert costs[2] - costs[0] == 3 * (costs[1] - costs[0]) > 0  # other blocks stay as they are


def test_selectors_of_some_blocks_hold_there(tmp_path: Path) -> None:
    costs = [
        measured(of_file(tmp_path, "theirs.txt", f"{pattern}.up::matmul")).backward_flops
        for pattern in ("layers.*", "layers.[01]", "layers.1")
    ]
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0


def test_selectors_that_never_fire_are_reported(tmp_path: Path) -> None:
    strategy = of_file(
        tmp_path, "theirs.txt", "layers.*.up::aten.mm.default\nlayers.*.up::aten.addmm.default"
    )
    model = strategy.apply(toy())
    model(torch.arange(8).view(2, 4))
    assert strategy.observe(model).never_fired == ("layers.*.up::aten.mm.default",)


REFUSED: dict[str, tuple[str, str, str]] = {
    "no such module": (
        "theirs.txt",
        "layers.*.upp::aten.addmm.default",
        (
            "ac.path: 'layers.*.upp' matches no module of the blocks; "
            "the nearest: 'layers.*.up', 'layers.*.out', 'layers.*'"
        ),
    ),
    "no such operator": (
        "theirs.txt",
        "layers.*.up::aten.adm.default",
        (
            "ac.path: {path!r}: 'aten.adm.default' is no group and no operator; did you mean "
            "'aten.addmm.default'? groups are: matmul, conv, attention, comm, max, topk; "
            "an operator is written as aten.mm.default"
        ),
    ),
    "two modules in a line": (
        "theirs.txt",
        "layers.*::up::aten.addmm.default",
        (
            "ac.path: {path!r}: 'layers.*::up::aten.addmm.default' has more than one '::'; "
            "write a line for each module"
        ),
    ),
    "an operator packet": (
        "theirs.txt",
        "aten.mm",
        (
            "ac.path: {path!r}: 'aten.mm' is an operator packet, which never matches; "
            "its overloads are: aten.mm.default, aten.mm.dtype"
        ),
    ),
    "nothing": (
        "theirs.txt",
        "# nothing yet\n",
        "ac.path: {path!r} selects nothing; write lines such as layers.*.mlp::aten.mm.default",
    ),
    "no such block": (
        "regions.yaml",
        "layers.3: [up]",
        "ac.path: 'layers.3' is no block of the model; the nearest: 'layers.2', 'layers.1', 'layers.0'",
    ),
    "no such region": (
        "regions.yaml",
        "layers.1: [attention.out]",
        "ac.path: 'layers.1' has no submodule 'attention.out'; the nearest: 'dropout', 'out'",
    ),
    "no regions": (
        "regions.yaml",
        "layers.0",
        (
            "ac.path: {path!r} must name submodules of blocks, as show=torch_remat prints them: "
            "layers.0: [attention, mlp.up]"
        ),
    ),
    "no YAML": (
        "regions.yaml",
        "layers.0: [up",
        (
            "ac.path: {path!r} is no YAML: while parsing a flow sequence, line 1, column 11: "
            "expected ',' or ']', but got '<stream end>'"
        ),
    ),
    "YAML without an end": (
        "regions.yaml",
        "[" * 3_000,
        "ac.path: {path!r} is no YAML that can be read: it nests too deeply",
    ),
    "a block twice": (
        "regions.yaml",
        "layers.0: [up]\nlayers.1: [up]\nlayers.0: [out]",
        "ac.path: {path!r} names 'layers.0' more than once; write all of its submodules in one list",
    ),
    "another function": (
        "mine.py",
        "def policy_fn(op): ...",
        "ac.path: policy_fn of {path!r} is no policy of torch, which takes (ctx, op, *args, **kwargs)",
    ),
}


@REMAT
@pytest.mark.parametrize(("name", "text", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        of_file(tmp_path, name, text).apply(toy())
    assert str(error.value) == message.format(path=str(tmp_path / name))


def test_a_stage_of_a_pipeline_has_some_of_the_blocks(tmp_path: Path) -> None:
    model: Any = toy()
    model.layers[0] = AbsentBlock()
    strategy = of_file(tmp_path, "theirs.txt", "layers.0.up::matmul\nlayers.1.up::matmul")
    assert strategy.apply(model) is model


def test_a_save_list_names_no_modules() -> None:
    with pytest.raises(StrategyError) as error:
        SelectiveOp(layers_fqn="layers", save_ops=["layers.*.up::matmul"])
    assert str(error.value) == (
        "ac.save_ops: 'layers.*.up::matmul' names a module; write such lines into a file, and use ac=file "
        "ac.path=FILE"
    )


def test_an_operator_that_its_module_does_not_run_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    right = "layers.*.up::aten.addmm.default\nlayers.*::attention\nlayers.?::aten.bmm.default\n"
    with torch.device("meta"):
        models, tokens = (toy(), toy()), torch.zeros(2, 8, dtype=torch.int64)
    of_file(tmp_path, "right.txt", right).apply(models[0], (tokens,))
    with pytest.raises(StrategyError) as error:
        of_file(tmp_path, "theirs.txt", f"{right}layers.*.up::aten.mm.default").apply(models[1], (tokens,))
    assert str(error.value) == "ac.path: 'layers.*.up' runs no aten.mm.default; it runs aten.addmm.default"


def test_a_model_that_needs_data_is_not_asked_for_its_operators(tmp_path: Path) -> None:
    class Reads(Toy):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * float(tokens.sum())

    with torch.device("meta"):
        model, tokens = Reads(), torch.zeros(2, 8, dtype=torch.int64)
    assert of_file(tmp_path, "theirs.txt", "layers.*.up::aten.mm.default").apply(model, (tokens,)) is model
