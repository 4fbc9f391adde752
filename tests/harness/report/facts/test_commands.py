from __future__ import annotations

import shlex
from typing import Any

import pytest

from harness.command_line.schema import experiment_fields, materialise
from harness.report.facts.commands import command
from tests.harness.composing import composed
from tests.harness.records_fixture import experiment

CASES = {
    "nothing but defaults": ([], "acbench"),
    "chosen groups": (["ac=full", "mesh=shard2"], "acbench mesh=shard2 ac=full"),
    "an option that a model hands on is not repeated": (
        ["model=hf", "model.layers_fqn=model.layers", "model.config_class=LlamaConfig", "ac=full"],
        "acbench model=hf model.layers_fqn=model.layers model.vocab_size=256 model.config_class=LlamaConfig ac=full",  # noqa: E501
    ),
    "free numbers of a mesh": (["mesh.dp_shard=3", "batch_size=6"], "acbench mesh.dp_shard=3 batch_size=6"),
    "lists and nothing": (
        ["ac=selective_op", "ac.save_ops=[aten.mm.default,max]", "ac.matmul_recompute_every=2"],
        "acbench ac=selective_op 'ac.save_ops=[aten.mm.default,max]' ac.matmul_recompute_every=2",
    ),
    "a tree of labels": (
        ["ac=nested", "ac.labels={layers.0: [0,0], layers.1: 1}"],
        "acbench ac=nested 'ac.labels={layers.0: [0,0], layers.1: [1]}'",
    ),
    "words that mean something else, and a colon": (
        ["model=python", "model.factory=a.b:make", "model.layers_fqn='null'"],
        """acbench model=python 'model.layers_fqn='"'"'null'"'"'' model.factory=a.b:make""",
    ),
    "a name and arguments of the user's": (
        [
            "model=python",
            "model.factory=a.b:make",
            "model.name=wide",
            "model.layers_fqn=x",
            "++model.kwargs.width=4",
        ],
        """acbench model=python model.name=wide model.layers_fqn=x model.factory=a.b:make 'model.kwargs={width: 4}'""",  # noqa: E501
    ),
    "a dtype where the model's own is usual": (
        ["model=python", "model.factory=a.b:make", "model.layers_fqn=x", "dtype=fp32"],
        """acbench model=python model.layers_fqn=x model.factory=a.b:make dtype=fp32""",
    ),
    "scalars": (
        ["learning_rate=3e-4", "dtype=bf16", "seed=7"],
        "acbench learning_rate=0.0003 dtype=bf16 seed=7",
    ),
}


def resolved(overrides: list[str]) -> dict[str, Any]:
    return materialise(experiment_fields(composed(overrides))).to_dict()


@pytest.mark.parametrize(
    ("overrides", "line"), [pytest.param(*case, id=name) for name, case in CASES.items()]
)
def test_the_command_says_what_differs_and_makes_the_same_trial(overrides: list[str], line: str) -> None:
    wanted = resolved(overrides)
    found = command(wanted)
    assert found == line
    assert resolved(shlex.split(found)[1:]) == wanted


@pytest.mark.parametrize("path", [r"it's a\'file", "a\\", "with space, comma", "été/ü.txt"])
def test_paths_are_quoted_for_the_shell_and_for_hydra(path: str) -> None:
    wanted = resolved(["data=text"])
    wanted["data"]["path"] = path
    found = command(wanted)
    assert found is not None
    assert composed(shlex.split(found)[1:]).data.path == path


@pytest.mark.parametrize("name", ["a" * 200_000, "../../secret", "a\0b", ""])
def test_a_name_of_any_text_is_no_file(name: str) -> None:
    asked = materialise(experiment_fields(composed([]))).to_dict()
    written = command({**asked, "model": asked["model"] | {"name": name}})
    assert written is not None
    assert written.startswith("acbench model=gpt ")


def test_an_experiment_that_was_never_resolved_has_no_command() -> None:
    assert command(experiment() | {"mesh": "nowhere"}) is None
