"""The YAML beside each variant: same name, same fields, same defaults."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from strategies import ac_variants, chunk_variants, shard_variants
from tests.strategies.installed import ABSENT

CONF = Path(__file__).parents[3] / "conf"
VARIANTS = {
    f"{group}/{name}": cls
    for group, variants in (("ac", ac_variants), ("chunk", chunk_variants), ("shard", shard_variants))
    for name, cls in variants.items()
}


@pytest.mark.parametrize("path", VARIANTS)
def test_yaml_has_the_name_and_every_field(path: str) -> None:
    written = OmegaConf.to_container(OmegaConf.load(CONF / f"{path}.yaml"), resolve=False)
    assert isinstance(written, dict)
    assert list(written) == ["name", *(field.name for field in fields(VARIANTS[path]))]
    assert written["name"] == path.partition("/")[2]


# a budget, names and code of the user's have no default: nobody knows what a model may take, or what is asked
@pytest.mark.parametrize(
    "path",
    [path for path in VARIANTS if not path.endswith(("/budget", "/file", "/modules", "/python", "/tiles"))],
)
def test_yaml_makes_the_default_variant(path: str) -> None:
    if path.removeprefix("ac/") in ABSENT:
        pytest.skip("its package is not installed")
    written = OmegaConf.load(CONF / f"{path}.yaml")
    whole = OmegaConf.create({"model": {"layers_fqn": ""}, "written": written})
    values = OmegaConf.to_container(whole.written, resolve=True)
    assert isinstance(values, dict)
    del values["name"]
    assert (
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(VARIANTS[path]), values)) == VARIANTS[path]()
    )


# what a compiler decides, it decides of whole graphs; code of others finds its blocks itself
_WITHOUT_BLOCKS = {
    "ac/accelerate",
    "ac/compiler_budget",
    "ac/file",
    "ac/none",
    "ac/python",
    "ac/transformers",
    "ac/trl",
}


@pytest.mark.parametrize(
    "path",
    [path for path in VARIANTS if path.startswith("ac/") and path not in _WITHOUT_BLOCKS],
)
def test_yaml_takes_the_blocks_from_the_model(path: str) -> None:
    written = OmegaConf.to_container(OmegaConf.load(CONF / f"{path}.yaml"), resolve=False)
    assert isinstance(written, dict)
    assert written["layers_fqn"] == "${model.layers_fqn}"
