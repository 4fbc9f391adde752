"""What a trial is compared with; that the comparison finds errors is in tests/parity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment, name_of
from harness.measure.probes.probing import CONTROLS
from harness.records.parity_result import (
    PARTS,
    Compared,
    FirstDifference,
    Parity,
    PartParity,
    first_of,
)
from harness.trial.links import chain
from harness.trial.proof import Prover
from tests.harness.composing import experiment_of
from tests.toy_trainee import toy_batches, toy_trainee

_TWIN = "ac=none chunk=none shard=none"
_SHARDED = "ac=none chunk=none shard=megatron"
_FULL = "ac=full chunk=none shard=none"
_BOTH = "ac=full chunk=none shard=megatron"
_AOT = "compile=aot_eager"
_KERNELS = "compile=inductor"
_DRAWS = f"{_KERNELS} fallback_random=true"
_ROUNDS = f"{_KERNELS} emulate_precision_casts=true"
_STEP = (_SHARDED, _TWIN, "fp32", "sgd", 1e-4, 2)
_DENSE = (_TWIN, "the dense model", "fp32", "sgd", 1e-4, 2)
CHAINS = [
    pytest.param("", [(_TWIN, _TWIN, "fp32", "adamw", None, 3), _DENSE], id="the plain model against itself"),
    pytest.param(
        "ac=full", [(_FULL, _TWIN, "fp32", "adamw", None, 3), _DENSE], id="AC against the plain model"
    ),
    pytest.param(
        "compile=aot_eager ac=full compile_order=compile_first",
        [
            (f"{_FULL} {_AOT}", f"{_TWIN} {_AOT}", "fp32", "adamw", None, 3),
            (f"{_TWIN} {_AOT}", f"{_TWIN} compile=none", "fp32", "adamw", None, 2),
            _DENSE,
        ],
        id="compiled AC against the compiled model, and that against the plain one",
    ),
    pytest.param(
        "compile=inductor",
        [(f"{_TWIN} {_DRAWS}", f"{_TWIN} compile=none", "fp32", "sgd", 1e-3, 3), _DENSE],
        id="the compiled model against the plain one",
    ),
    pytest.param(
        "compile=inductor ac=full mesh=single",
        [
            (f"{_FULL} {_KERNELS}", f"{_TWIN} {_KERNELS}", "fp32", "sgd", 1e-3, 3),
            (f"{_TWIN} {_DRAWS}", f"{_TWIN} compile=none", "fp32", "sgd", 1e-3, 2),
        ],
        id="what kernels compute again beside other operators",
    ),
    pytest.param(
        "compile=inductor ac=full dtype=bf16 mesh=single",
        [
            (f"{_FULL} {_KERNELS}", f"{_TWIN} {_KERNELS}", "bf16", "sgd", 1e-1, 3),
            (f"{_FULL} {_ROUNDS}", f"{_TWIN} {_ROUNDS}", "bf16", "adamw", None, 3),
            (f"{_TWIN} {_DRAWS}", f"{_TWIN} compile=none", "bf16", "sgd", 1e-1, 2),
        ],
        id="what kernels compute again unrounded, and the same rounded",
    ),
    pytest.param(
        "compile=inductor ac=full dtype=bf16 compile_order=compile_first mesh=single",
        [
            (f"{_FULL} {_KERNELS}", f"{_TWIN} {_KERNELS}", "bf16", "adamw", None, 3),
            (f"{_TWIN} {_DRAWS}", f"{_TWIN} compile=none", "bf16", "sgd", 1e-1, 2),
        ],
        id="kernels that run once more",
    ),
    pytest.param(
        "compile=aot_eager shard=megatron",
        [
            (f"{_SHARDED} {_AOT}", f"{_SHARDED} compile=none", "fp32", "adamw", None, 3),
            (_SHARDED, _TWIN, "fp32", "adamw", 1e-3, 3),
            _STEP,
            _DENSE,
        ],
        id="a compiled sharding against the same uncompiled",
    ),
    pytest.param(
        "shard=megatron",
        [(_SHARDED, _TWIN, "fp32", "adamw", 1e-3, 3), _STEP, _DENSE],
        id="sharding, and two steps of SGD",
    ),
    pytest.param(
        "shard=megatron dtype=bf16",
        [(_SHARDED, _TWIN, "bf16", "adamw", 1e-1, 3), _STEP, _DENSE],
        id="sharding in half precision, and two steps in single",
    ),
    pytest.param(
        "shard=megatron ac=full",
        [(_BOTH, _SHARDED, "fp32", "adamw", None, 3), _STEP, _DENSE],
        id="AC against the same sharding, and that against none",
    ),
    pytest.param(
        "shard=megatron ac=full dtype=bf16_mixed",
        [
            (_BOTH, _SHARDED, "bf16_mixed", "adamw", None, 3),
            (_SHARDED, _TWIN, "bf16_mixed", "adamw", 1e-1, 1),
            _STEP,
            _DENSE,
        ],
        id="the same in half precision",
    ),
]


@pytest.mark.parametrize("ac", ["none", "full"])
def test_what_is_equal_within_rounding_is_proven_with_sgd(ac: str) -> None:
    small = (
        "model.n_layers=1 model.width=8 model.hidden_width=16 data=synthetic sequence_length=8 batch_size=2"
    )
    (link,) = chain(experiment_of(f"mesh=shard2 ac={ac} chunk=minimum model=mlp {small}"))
    assert (link.compared.optimizer, link.compared.relative) == ("sgd", 1e-3)
    assert link.baseline.optimizer == "sgd"
    assert name_of(link.variant.chunk) == "minimum"


@pytest.mark.parametrize(("line", "expected"), CHAINS)
def test_a_chain_reaches_from_the_variant_to_the_plain_model(
    line: str, expected: list[tuple[str, str, str, str, float | None, int]]
) -> None:
    links = chain(experiment_of(f"mesh=tp2 protocol.parity_steps=3 {line}"))
    found = [
        (
            link.compared.variant,
            link.compared.baseline,
            link.compared.dtype,
            link.compared.optimizer,
            link.compared.relative,
            link.steps,
        )
        for link in links
    ]
    assert found == expected


def test_the_sharding_is_that_of_the_trial_in_every_link() -> None:
    *links, dense = chain(experiment_of("mesh=shard2_tp2 shard=cheapest ac=full dtype=bf16 seed=7"))
    assert (name_of(dense.variant.shard), dense.is_dense, dense.whole) == ("none", True, True)
    assert [link.variant.shard for link in links] == [links[0].variant.shard] * 3
    assert {(link.variant.mesh, link.variant.seed) for link in links} == {(links[0].variant.mesh, 7)}
    assert [link.whole for link in links] == [False, True, True]


def test_a_difference_along_the_chain_says_between_what() -> None:
    difference = FirstDifference(name="w", index=(1,), rank=0, step=0, expected=1.0, actual=2.0)
    unequal = PartParity(equal=False, max_abs=1.0, max_rel=1.0, first_difference=difference)
    equal = Parity(
        level="bitwise",
        steps=1,
        losses=(1.0,),
        outputs=PartParity(),
        loss=PartParity(),
        gradients=PartParity(),
        buffers=PartParity(),
        rng_state=PartParity(),
        parameters=PartParity(),
    )
    compared = Compared(variant=_SHARDED, baseline=_TWIN, dtype="fp32", optimizer="sgd", relative=1e-4)
    parts = {part: PartParity() for part in PARTS} | {"gradients": unequal}
    link = replace(equal, gradients=unequal, first=first_of(parts, {}), compared=compared)
    whole = replace(equal, chain=(link,))
    assert (equal.is_equal, whole.is_equal) == (True, False)
    (sentence,) = whole.differences()
    assert sentence == (
        "parity: gradient of 'w' differs first at (1,) on rank 0 in step 0: 1.000 vs 2.000 "
        f"({_SHARDED} against {_TWIN} in fp32)"
    )


class Counted(nn.Module):
    """A linear layer, and state of the module's file that it shares with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        SHARED["calls"] += 1
        output: Tensor = self.linear(x) * (SHARED["calls"] if SHARED["is_read"] else 1)
        return output


SHARED = {"calls": 0, "is_read": False}


def drawn_elsewhere() -> nn.Module:
    """Return a model with weights that every call draws anew."""
    model = Counted()
    SHARED["calls"] += 1
    nn.init.constant_(model.linear.weight, 1 / SHARED["calls"])
    return model


def doubled(model: nn.Module) -> Callable[..., Any]:
    """Return a forward with gradients twice as large."""

    def call(x: Tensor) -> Tensor:
        output: Tensor = model(x)
        output.register_hook(lambda gradient: 2 * gradient)
        return output

    return call


@pytest.mark.parametrize(
    ("build", "is_read", "wrong", "verdict"),
    [
        pytest.param(Counted, False, None, None, id="equal, so that nobody is blamed"),
        pytest.param(Counted, False, doubled, "the variant", id="the variant is wrong"),
        pytest.param(Counted, True, None, "nobody", id="twin and variant share state of their file"),
        pytest.param(drawn_elsewhere, False, None, "nobody", id="weights that no call repeats"),
        pytest.param(drawn_elsewhere, False, doubled, "nobody", id="wrong, but nothing shows it"),
    ],
)
def test_the_plain_model_is_compared_with_itself_before_a_variant_is_blamed(
    build: Callable[[], nn.Module],
    is_read: bool,
    wrong: Callable[[nn.Module], Callable[..., Any]] | None,
    verdict: str | None,
) -> None:
    SHARED.update(calls=0, is_read=is_read)
    (link,) = chain(experiment_of("ac=full protocol.parity_steps=2"))
    built: list[str] = []

    def assembled(experiment: Experiment) -> Any:
        built.append(name_of(experiment.ac))
        return toy_trainee(build, call=wrong if built[-1] == "full" else None)

    batches = toy_batches(2, 4, 8)
    prover = Prover(assembled=assembled, batch=batches.__getitem__, rank=0, dp_rank=0)
    parity = prover.compare(link)
    assert (parity.control is None) == (verdict is None)
    assert parity.is_equal == (verdict is None)
    if verdict is not None:
        assert (parity.unrepeated is None) == (verdict == "the variant")
        assert bool(parity.blamed) == (verdict == "the variant")
        assert parity.control is not None
        assert parity.control.steps == 1  # no more than until the first difference
    controls = {None: 0, "the variant": 2 * CONTROLS, "nobody": 2}[verdict]
    assert sorted(built) == ["full", *["none"] * (1 + controls)]


def test_the_control_ends_where_any_rank_differs() -> None:
    (link,) = chain(experiment_of("ac=full protocol.parity_steps=2"))
    asked: list[int | None] = []

    def earliest(step: int | None) -> int | None:
        asked.append(step)
        return 1 if len(asked) == 1 else None

    def assembled(_experiment: Experiment) -> Any:
        return toy_trainee(Counted)

    prover = Prover(
        assembled=assembled,
        batch=toy_batches(2, 4, 8).__getitem__,
        rank=0,
        dp_rank=0,
        earliest=earliest,
    )
    SHARED.update(calls=0, is_read=False)
    parity = prover.compare(link)
    assert asked == [None] * (1 + CONTROLS)
    assert parity.control is not None
    assert parity.control.steps == 2


def test_a_dense_model_that_does_not_fit_leaves_the_plan_unproven() -> None:
    def dense(_experiment: Experiment) -> Any:
        raise torch.OutOfMemoryError

    prover = Prover(
        assembled=lambda _experiment: toy_trainee(lambda: nn.Linear(8, 8)),  # type: ignore[arg-type,return-value]
        batch=toy_batches(3, 4, 8).__getitem__,
        rank=0,
        dp_rank=0,
        dense=dense,
    )
    parity = prover.prove(experiment_of("mesh=tp2 protocol.parity_steps=1"))
    assert (parity.is_equal, parity.chain) == (True, ())
    assert parity.unproven == (
        "the tensor parallel plan was not compared with the dense model, which does not fit into a rank; "
        "prove the plan on fewer blocks"
    )
