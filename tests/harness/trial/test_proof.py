"""What a trial is compared with; that the comparison finds errors is in tests/parity."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.experiment.links import chain
from harness.records.parity_result import Compared, FirstDifference, Parity, PartParity
from tests.harness.composing import experiment_of

_TWIN = "ac=none chunk=none shard=none"
_SHARDED = "ac=none chunk=none shard=megatron"
_FULL = "ac=full chunk=none shard=none"
_BOTH = "ac=full chunk=none shard=megatron"
_STEP = (_SHARDED, _TWIN, "fp32", "sgd", 1e-4, 2)
CHAINS = [
    pytest.param("", [(_TWIN, _TWIN, "fp32", "adamw", None, 3)], id="the plain model against itself"),
    pytest.param("ac=full", [(_FULL, _TWIN, "fp32", "adamw", None, 3)], id="AC against the plain model"),
    pytest.param(
        "shard=megatron",
        [(_SHARDED, _TWIN, "fp32", "adamw", 1e-3, 3), _STEP],
        id="sharding, and two steps of SGD",
    ),
    pytest.param(
        "shard=megatron dtype=bf16",
        [(_SHARDED, _TWIN, "bf16", "adamw", 1e-1, 3), _STEP],
        id="sharding in half precision, and two steps in single",
    ),
    pytest.param(
        "shard=megatron ac=full",
        [(_BOTH, _SHARDED, "fp32", "adamw", None, 3), _STEP],
        id="AC against the same sharding, and that against none",
    ),
    pytest.param(
        "shard=megatron ac=full dtype=bf16_mixed",
        [
            (_BOTH, _SHARDED, "bf16_mixed", "adamw", None, 3),
            (_SHARDED, _TWIN, "bf16_mixed", "adamw", 1e-1, 1),
            _STEP,
        ],
        id="the same in half precision",
    ),
]


@pytest.mark.parametrize("ac", ["none", "full"])
def test_what_is_equal_within_rounding_is_proven_with_sgd(ac: str) -> None:
    (link,) = chain(experiment_of(f"mesh=shard2 ac={ac} chunk=minimum"))
    assert (link.compared.optimizer, link.compared.relative) == ("sgd", 1e-3)
    assert link.baseline.optimizer == "sgd"
    assert link.variant.chunk == experiment_of("chunk=minimum").chunk


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
    links = chain(experiment_of("mesh=shard2_tp2 shard=cheapest ac=full dtype=bf16 seed=7"))
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
    whole = replace(equal, chain=(replace(equal, gradients=unequal, compared=compared),))
    assert (equal.is_equal, whole.is_equal) == (True, False)
    (sentence,) = whole.differences()
    assert sentence == (
        "parity: gradient of 'w' differs first at (1,) on rank 0: 1.000 vs 2.000 "
        f"({_SHARDED} against {_TWIN} in fp32)"
    )
