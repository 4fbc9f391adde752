from __future__ import annotations

from typing import Any

import pytest

from tests.harness.records_fixture import experiment, rank_result, record

UNEQUAL = {"equal": False, "max_abs": 1.0, "max_rel": 1.0, "first_difference": None}
IDLE = {"recomputed_ops": {}, "recomputed_flops": 0}
SAME = {"saved_bytes": 12_582_912, "peak_bytes": 20_971_520}  # as many as the twin


def result(**changes: dict[str, Any] | None) -> dict[str, Any]:
    changed = rank_result()
    for part, values in changes.items():
        changed[part] = None if values is None else changed[part] | values
    return changed


NEUTRAL = [
    pytest.param("full", result(), id="everything is equal"),
    pytest.param("full", result(parity={"level": "tolerance"}), id="equal within a declared tolerance"),
    pytest.param("full", result(memory=SAME | {"saved_bytes": 12_582_911}), id="fewer bytes, no lower peak"),
    pytest.param("full", result(memory=SAME | {"peak_bytes": 20_971_519}), id="a lower peak, no fewer bytes"),
    pytest.param(
        "full",
        result(memory=SAME | {"saved_bytes": 12_587_967, "random_state_bytes": 5_056}),
        id="fewer bytes but for a stashed random state",
    ),
    pytest.param(
        "full",
        result(memory=SAME, work=IDLE | {"acted_otherwise": True}),
        id="recomputed with other random numbers",
    ),
    pytest.param("full", result(work=IDLE), id="nothing recomputed, but bytes saved"),
    pytest.param(
        "offload",
        result(memory={"peak_bytes": 20_971_520}, work=IDLE, observation={"offloaded_bytes": 1}),
        id="only offloaded",
    ),
    pytest.param("none", result(memory=SAME, work=IDLE), id="the plain trial promises nothing"),
    pytest.param(
        "selective_op",
        result(observation={"named": ["mm", "sdpa"], "never_fired": ["sdpa"]}),
        id="one of two operators fired",
    ),
]
SHARDED = [
    pytest.param("none", "neutral", id="sharding promises no saving"),
    pytest.param("full", "inert", id="AC does, on a sharded model too"),
]
DIFFERS = [
    *(
        pytest.param("full", result(parity={part: UNEQUAL}), id=f"{part} not equal")
        for part in ("outputs", "loss", "gradients", "buffers", "rng_state", "parameters")
    ),
    pytest.param("none", result(parity={"loss": UNEQUAL}), id="the plain trial is not repeatable"),
    pytest.param("full", result(parity={"gradients": UNEQUAL}, memory=SAME, work=IDLE), id="outranks inert"),
]
CHAIN = [
    pytest.param({}, "neutral", id="the twin equals the plain model"),
    pytest.param({"gradients": UNEQUAL}, "differs", id="the twin repeats the variant's error"),
]
INERT = [
    pytest.param("full", result(memory=SAME), id="recomputed, and no byte freed"),
    pytest.param(
        "full", result(memory=SAME | {"saved_bytes": 12_582_913}), id="recomputed, and more bytes saved"
    ),
    pytest.param(
        "offload", result(memory=SAME, observation={"offloaded_bytes": 1}), id="offloaded for nothing"
    ),
    pytest.param("full", result(memory=SAME, work=IDLE), id="as many bytes, nothing recomputed"),
    pytest.param(
        "full",
        result(memory=SAME | {"saved_bytes": 12_582_913}, work=IDLE),
        id="more bytes, nothing recomputed",
    ),
    pytest.param(
        "selective_op",
        result(observation={"named": ["sdpa"], "never_fired": ["sdpa"]}),
        id="a save list that silently equals full AC",
    ),
    pytest.param("full", result(memory=SAME, work=IDLE, parity=None), id="also without parity"),
]
UNVERIFIED = [
    pytest.param("full", result(parity=None), id="nothing to compare with"),
    pytest.param("full", result(parity=None, baseline=None, work=IDLE), id="no twin to save bytes against"),
]


@pytest.mark.parametrize(("ac", "measured"), NEUTRAL)
def test_neutral(ac: str, measured: dict[str, Any]) -> None:
    assert record(experiment(ac), measured).verdict == "neutral"


@pytest.mark.parametrize(("ac", "measured"), DIFFERS)
def test_differs(ac: str, measured: dict[str, Any]) -> None:
    assert record(experiment(ac), measured).verdict == "differs"


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        pytest.param({}, "nothing was compiled", id="no word of why"),
        pytest.param({"graph_breaks": {"HOP": 3}}, "nothing was compiled: HOP", id="a graph break"),
        pytest.param({"compiled_graphs": 2}, None, id="two graphs"),
    ],
)
def test_a_compiler_that_compiles_nothing_is_inert(work: dict[str, Any], reason: str | None) -> None:
    found = record(experiment("none") | {"compile": "aot_eager"}, result(work=work))
    assert (found.verdict, found.reason) == ("neutral" if reason is None else "inert", reason)


@pytest.mark.parametrize(("ac", "measured"), INERT)
def test_inert(ac: str, measured: dict[str, Any]) -> None:
    assert record(experiment(ac), measured).verdict == "inert"


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ({"layers.0": 1, "layers.1": 1}, ""),
        ({"layers.0": 1, "layers.1": 0}, ": forward does not call 'layers.1'; name "),
        ({"layers.0": 0, "layers.1": 0}, ": forward does not call 'layers.0' and 1 more; name "),
    ],
    ids=["all", "one", "none"],
)
def test_an_inert_trial_names_blocks_that_forward_does_not_call(calls: dict[str, int], named: str) -> None:
    found = record(experiment("full"), result(memory=SAME, work=IDLE | {"calls": calls}))
    remedy = "modules that it calls by model.layers_fqn, ac.module_classes or ac.labels" if named else ""
    assert found.reason == f"no byte saved, and nothing recomputed, offloaded or chunked{named}{remedy}"


def test_what_frees_nothing_says_its_bytes_and_the_plain_models() -> None:
    found = record(experiment("full"), result(memory=SAME | {"saved_bytes": 12_582_913}))
    assert found.reason == (
        "frees nothing: 12,582,913 saved bytes, 12,582,912 without it; "
        "peak 20,971,520 bytes, 20,971,520 without it"
    )


@pytest.mark.parametrize(("ac", "measured"), UNVERIFIED)
def test_unverified(ac: str, measured: dict[str, Any]) -> None:
    assert record(experiment(ac), measured).verdict == "unverified"


PROBED = {"probe": "leak", "reason": "each step leaves more", "part": "leak", "name": "(live storages)"}


@pytest.mark.parametrize("word", ["differs", "unverified"])
def test_what_a_probe_finds_decides_where_parity_is_equal(word: str) -> None:
    probed = rank_result() | {"probes": {"asked": ["leak"], "finding": PROBED | {"verdict": word}}}
    found = record(experiment("full"), probed)
    assert (found.verdict, found.reason) == (word, "each step leaves more")
    assert found.probes is not None
    drifting = probed | {"parity": probed["parity"] | {"gradients": UNEQUAL}}
    assert record(experiment("full"), drifting).reason != "each step leaves more"


@pytest.mark.parametrize(
    ("part", "word"),
    [
        pytest.param("gradients", "unverified", id="what nothing repeats is not blamed as idle"),
        pytest.param("state", "inert", id="a time of day does not hide it"),
    ],
)
def test_a_plain_model_that_does_not_repeat_itself_outranks_inert(part: str, word: str) -> None:
    control = rank_result()["parity"] | {part: UNEQUAL}
    drifting = result(memory=SAME, work=IDLE, parity={part: UNEQUAL, "control": control})
    found = record(experiment("full"), drifting)
    assert found.verdict == word
    assert (found.reason == "the plain model does not repeat itself") == (word == "unverified")


def test_chunking_alone_can_be_inert() -> None:
    resolved = experiment("none", chunk={"name": "budget"})
    assert record(resolved, result(memory=SAME, work=IDLE)).verdict == "inert"
    assert record(resolved, result(work=IDLE, observation={"chunks": 4})).verdict == "neutral"
    assert record(resolved, result(memory=SAME, work=IDLE, observation={"chunks": 4})).verdict == "inert"


@pytest.mark.parametrize(("ac", "verdict"), SHARDED)
def test_sharding_is_never_inert(ac: str, verdict: str) -> None:
    same = result(memory=SAME, work=IDLE)
    assert record(experiment(ac, shard={"name": "megatron"}), same).verdict == verdict


@pytest.mark.parametrize(("changes", "verdict"), CHAIN)
def test_the_verdict_is_of_the_whole_chain(changes: dict[str, Any], verdict: str) -> None:
    link = rank_result()["parity"] | changes
    sharded = experiment("full", shard={"name": "megatron"})
    assert record(sharded, result(parity={"chain": [link]})).verdict == verdict


@pytest.mark.parametrize(("ac", "verdict"), [("none", "neutral"), ("full", "inert")])
def test_chunks_that_nothing_needs_are_not_inert(ac: str, verdict: str) -> None:
    resolved = experiment(ac, chunk={"name": "budget"})
    unneeded = {"chunks": 0, "unneeded": "activations fit the budget as they are"}
    found = record(resolved, result(memory=SAME, work=IDLE, observation=unneeded))
    assert (found.verdict, found.note) == (verdict, "activations fit the budget as they are")
