"""The points of a sweep are what Hydra composes, whatever is overridden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins.acbench import composition
from hydra_plugins.acbench.composition import compose_all

CONF = Path(__file__).parents[2] / "conf"

USER_FILES = {
    "ac/mine.yaml": "name: full\nlayers_fqn: ${model.layers_fqn}\nwhole: ${model}\nseed: ${seed}\n",
    "model/bare.yaml": "name: mlp\n",
    "ac/everywhere.yaml": "# @package _global_\nac:\n  name: none\nseed: 7\nmodel:\n  dropout: 0.5\n",
    "batch_size/large.yaml": "# @package _global_\nlearning_rate: 0.5\n",
    "sweep/mapping.yaml": "# @package _global_\nseed:\n  first: 1\n",
}
"""A `--config-dir` whose options reach out of their groups."""


@pytest.fixture(scope="module", autouse=True)
def _version_base() -> Iterator[None]:
    before = version.getbase()
    version.setbase("1.3")
    yield
    version.VersionBase.instance().version_base = before


@pytest.fixture(scope="module")
def user_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    for name, text in USER_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def loader(user_dir: Path, _version_base: None) -> ConfigLoaderImpl:
    path = create_config_search_path(str(CONF))
    path.prepend("command-line", f"file://{user_dir}", SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(path)


@pytest.fixture(scope="module")
def master(loader: ConfigLoaderImpl) -> DictConfig:
    return _master(loader)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("ac=full", id="a choice"),
        pytest.param("ac=mine", id="an option that reads other values"),
        pytest.param("ac=everywhere", id="an option that writes elsewhere"),
        pytest.param("sweep=mapping", id="a preset that makes a mapping of the value"),
        pytest.param("batch_size=large", id="a group with the name of a value"),
        pytest.param("name=other", id="a string"),
        pytest.param("name='it''s'", id="a string in quotes"),
        pytest.param("name=1e3", id="a number for a string"),
        pytest.param("learning_rate=3", id="an integer for a number"),
        pytest.param("rerun=true", id="a truth value"),
        pytest.param("show=regions", id="a string where there was none"),
        pytest.param("learning_rate=null", id="nothing"),
        pytest.param("name='${model.name}'", id="an interpolation"),
        pytest.param("name='a\\${b}'", id="an escaped interpolation"),
        pytest.param("learning_rate=[1,2]", id="a list"),
        pytest.param("learning_rate={a: 1}", id="a mapping"),
        pytest.param("model.dropout=0.1", id="a value inside a group"),
        pytest.param("model.name='it''s'", id="a string inside a group"),
        pytest.param("ac.name=1e3", id="a number for a string inside a group"),
        pytest.param("mesh.tp=null", id="nothing inside a group"),
        pytest.param("mesh.absent=1", id="an unknown value inside a group"),
        pytest.param("mesh.tp.deeper=1", id="a value inside a value"),
        pytest.param("mesh.tp=[1,2]", id="a list inside a group"),
        pytest.param("absent.tp=1", id="a value inside of nothing"),
        pytest.param("++ac.whole.added=2", id="an added value"),
        pytest.param("~learning_rate", id="a deletion"),
        pytest.param("seed=8", id="the same value again"),
        pytest.param("~seed", id="a deletion of the same value"),
        pytest.param("++seed.a=1", id="a value inside the same value"),
        pytest.param("sed=1", id="an unknown value"),
        pytest.param("ac=nothing", id="an unknown option"),
        pytest.param("seed@ac=1", id="a value with a package"),
        pytest.param("hydra.job.name=other", id="a value of Hydra"),
        pytest.param("learning_rate=1,2", id="several values"),
        pytest.param("=", id="no override"),
    ],
)
def test_points_are_what_hydra_composes(loader: ConfigLoaderImpl, master: DictConfig, line: str) -> None:
    point = ["mesh=tp2", "seed=3", line]
    expected = _outcome(lambda: _composed_by_hydra(loader, master, point))
    found = _outcome(lambda: compose_all(loader, master, [point])[0])
    assert _described(found) == _described(expected)


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONF / "sweep").glob("*.yaml")))
def test_presets_of_the_program(loader: ConfigLoaderImpl, master: DictConfig, preset: str) -> None:
    lines = [f"sweep={preset}", "ac=full", "mesh=tp2", "++ac.early_stop=false", "seed=5"]
    (found,) = compose_all(loader, master, [lines])
    assert _described(found) == _described(_composed_by_hydra(loader, master, lines))


def test_a_search_path_of_the_command(user_dir: Path) -> None:
    loader = ConfigLoaderImpl(create_config_search_path(str(CONF)))
    master = _master(loader, f"hydra.searchpath=[file://{user_dir}]")
    (found,) = compose_all(loader, master, [["ac=mine", "seed=9"]])
    assert (found.ac.name, found.ac.seed) == ("full", 9)
    with pytest.raises(ConfigCompositionException, match="No match in the defaults list"):
        compose_all(loader, master, [["batch_size=large"]])


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the overrides of each composition by Hydra from now on."""
    composed: list[list[str]] = []
    by_hydra = ConfigLoaderImpl.load_sweep_config

    def load_sweep_config(self: ConfigLoaderImpl, master: DictConfig, overrides: list[str]) -> DictConfig:
        composed.append(overrides)
        return by_hydra(self, master, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", load_sweep_config)
    return composed


def test_points_that_differ_in_values_are_composed_once(
    loader: ConfigLoaderImpl, master: DictConfig, composed: list[list[str]]
) -> None:
    points = [
        [f"ac={ac}", f"seed={seed}", f"name=s{seed}", f"++model.dropout=0.{seed}"]
        for seed in range(3)
        for ac in ("none", "full")
    ]
    configs = compose_all(loader, master, points)
    assert [(config.ac.name, config.seed, config.name, config.model.dropout) for config in configs] == [
        (ac, seed, f"s{seed}", seed / 10) for seed in range(3) for ac in ("none", "full")
    ]
    assert composed == [["ac=none"], ["ac=full"]]


def test_options_that_a_choice_lacks_are_set_on_one_composed_point(
    loader: ConfigLoaderImpl, master: DictConfig, composed: list[list[str]]
) -> None:
    points = [[f"ac={ac}", f"++ac.fraction=0.{tenths}"] for ac in ("full", "budget") for tenths in range(3)]
    configs = compose_all(loader, master, points)
    assert [config.ac.fraction for config in configs] == [0.0, 0.1, 0.2] * 2
    assert composed == [["ac=full"], ["ac=budget"]]


def test_a_value_that_hydra_must_place_leaves_the_others_plain(
    loader: ConfigLoaderImpl, master: DictConfig, composed: list[list[str]]
) -> None:
    points = [["ac=mine", "++ac.whole.added=2", f"seed={seed}"] for seed in range(3)]
    configs = compose_all(loader, master, points)
    assert [(config.ac.whole.added, config.seed) for config in configs] == [(2, 0), (2, 1), (2, 2)]
    assert composed == [["ac=mine"], ["ac=mine", "++ac.whole.added=2"]]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["ac=mine", "ac.whole.dropout=0.1"], id="a value of another group's"),
        pytest.param(["ac=mine", "ac.layers_fqn=other", "model.layers_fqn=own"], id="values that refer"),
        pytest.param(["ac=mine", "ac.seed=4", "seed=5"], id="values of one name"),
        pytest.param(
            ["ac=mine", "model=bare", "ac.layers_fqn=other"], id="a value for one that refers to nothing"
        ),
        pytest.param(["model.dropout=0.1", "model.dropout=0.2"], id="a value twice"),
        pytest.param(["model.dropout=0.1", "~model.dropout"], id="a value that is deleted"),
        pytest.param(["ac=everywhere", "ac.name=full", "model.dropout=0.1"], id="values of a preset"),
        pytest.param(["ac=budget", "ac.fraction=0.5"], id="a number where there was none"),
        pytest.param(["ac=budget", "++ac.fraction=0.5"], id="an added value that is there"),
        pytest.param(["ac=full", "++ac.fraction=0.5"], id="an added value"),
        pytest.param(["~ac", "ac.name=full"], id="a value of a group that is gone"),
        pytest.param(["ac=full", "++ac.b=1", "++ac.a=2", "seed=5"], id="added values in their order"),
        pytest.param(["++ac.b=1", "++ac.a={c: 2}", "seed=5"], id="a value that is added before a mapping"),
        pytest.param(["++ac.b={c: 2}", "++ac.a=1", "seed=5"], id="a value that is added after a mapping"),
        pytest.param(["++ac.b=1", "++ac.b.c=2", "seed=5"], id="a value that is added inside another"),
        pytest.param(["++b=1", "++a=2", "model.dropout=0.1"], id="values that are added at the top"),
        pytest.param(
            ["ac=mine", "++ac.whole.added=2", "seed=5"], id="a value that is added to another group"
        ),
        pytest.param(["seed=5", "sed=1", "ac.sed=2"], id="a value next to unknown ones"),
    ],
)
def test_values_inside_groups_are_what_hydra_composes(
    loader: ConfigLoaderImpl, master: DictConfig, lines: list[str]
) -> None:
    expected = _outcome(lambda: _composed_by_hydra(loader, master, lines))
    found = _outcome(lambda: compose_all(loader, master, [lines])[0])
    assert _described(found) == _described(expected)


def test_points_share_nothing(loader: ConfigLoaderImpl, master: DictConfig) -> None:
    first, second = compose_all(loader, master, [["ac=full"], ["ac=full"]])
    first.ac.module_classes.append("Changed")
    first.model.dropout = 0.9
    assert (second.ac.module_classes, second.model.dropout) == ([], 0.0)


def test_the_first_wrong_point_is_refused(loader: ConfigLoaderImpl, master: DictConfig) -> None:
    with pytest.raises(ConfigCompositionException, match=r"^Could not override 'sed'\.\nTo append to your"):
        compose_all(loader, master, [["seed=1"], ["sed=1"], ["lr=1"]])


def test_a_long_composition_says_how_far_it_is(
    loader: ConfigLoaderImpl,
    master: DictConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(composition, "_REPORTED", 2)
    compose_all(loader, master, [["ac=none", "seed=1"], ["ac=none", "seed=2"], ["ac=full"], ["ac=offload"]])
    assert capsys.readouterr().err == "acbench: composed 3 of 4 points\n"


def test_a_large_sweep_says_at_once_what_it_does(
    loader: ConfigLoaderImpl,
    master: DictConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(composition, "_MANY", 2)
    monkeypatch.setattr(composition, "_PAUSE_S", 0.0)
    compose_all(loader, master, [[f"seed={seed}"] for seed in range(3)])
    said = ["composing 3 points", *(f"composed {count} of 3 points" for count in (1, 2, 3))]
    assert capsys.readouterr().err.splitlines() == [f"acbench: {line}" for line in said]


def _master(loader: ConfigLoaderImpl, *overrides: str) -> DictConfig:
    return loader.load_configuration("config", list(overrides), run_mode=RunMode.MULTIRUN)


def _composed_by_hydra(loader: ConfigLoaderImpl, master: DictConfig, lines: Sequence[str]) -> DictConfig:
    config = loader.load_sweep_config(master, list(lines))
    with open_dict(config):
        del config["hydra"]
    return config


def _outcome(compose: Any) -> Any:
    try:
        return compose()
    except Exception as error:  # noqa: BLE001 (whatever Hydra raises is what is expected)
        return error


def _described(outcome: Any) -> Any:
    """Return everything that can be told about a configuration or an error."""
    if not isinstance(outcome, DictConfig):
        cause = outcome.__cause__
        return type(outcome).__name__, str(outcome), type(cause).__name__, str(cause)
    try:
        resolved: Any = OmegaConf.to_container(outcome, resolve=True)
    except OmegaConfBaseException as error:
        resolved = str(error)
    return _tree(outcome), resolved


def _tree(node: Any) -> tuple[Any, ...]:
    """Return a node as it is written, its keys in order, with its types and flags."""
    known = node._metadata
    about = (type(node).__name__, known.ref_type, known.object_type, known.optional, known.key, known.flags)
    content = node.__dict__["_content"] if isinstance(node, DictConfig) else node._value()
    if isinstance(content, dict):
        return *about, [(key, _tree(child)) for key, child in content.items()]
    return *about, repr(content)
