"""Patching points together gives what Hydra composes in full, whatever is overridden."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins.acbench.composition import compose_all

CONF = Path(__file__).parents[2] / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")

USER_FILES = {
    "ac/mine.yaml": "name: full\nlayers_fqn: ${model.layers_fqn}\nwhole: ${model}\n",
    "ac/empty.yaml": "",
    "ac/missing.yaml": "name: full\nlayers_fqn: ???\n",
    "ac/heir.yaml": "defaults:\n  - full\n  - _self_\nearly_stop: false\n",
    "ac/no_defaults.yaml": "defaults: []\nname: full\n",
    "ac/with_mesh.yaml": "defaults:\n  - override /mesh: shard2\nname: full\n",
    "ac/with_extra.yaml": "defaults:\n  - /extra: small\n  - _self_\nname: full\n",
    "ac/everywhere.yaml": "# @package _global_\nac:\n  name: none\nseed: 7\nmodel:\n  dropout: 0.5\n",
    "ac/elsewhere.yaml": "# @package model\nname: misplaced\n",
    "ac/at_home.yaml": "# @package ac\nname: full\n",
    "ac/a_list.yaml": "- 1\n- 2\n",
    "ac/full.yaml": "name: never read, the program's own comes first\n",
    "ac/deep/below.yaml": "name: none\n",
    "model/by_choice.yaml": "defaults: [optional /extra: '${ac}_${mesh}', _self_]\nname: by_choice\n",
    "model/reader.yaml": "name: ${ac.name}\nlayers_fqn: ${mesh.fsdp}\nmesh: ${mesh}\n",
    "mesh/name_of_model.yaml": "name: ${model.name}\ndp_shard: 2\n",
    "extra/small.yaml": "size: 1\n",
    "extra/none_single.yaml": "size: 2\n",
    "extra/mine_shard2.yaml": "size: 3\n",
    "sweep/writes.yaml": "# @package _global_\nmodel:\n  dropout: 0.25\nmesh:\n  fsdp: fsdp1\n",
    "sweep/merges.yaml": "# @package _global_\nac:\n  whole:\n    added: 1\n",
    "sweep/copies.yaml": "# @package _global_\ndefaults: [copied, _self_]\ncopy:\n  added: 1\n",
    "sweep/copied.yaml": "# @package _global_\ncopy: ${model}\n",
    "sweep/chooses.yaml": "# @package _global_\ndefaults:\n  - override /ac: full\n  - override /mesh: tp2\n",
    "sweep/sweeps.yaml": "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n",
    "sweep/read_by.yaml": "size: ${seed}\n",
}
"""A `--config-dir` that does what an option file can do, and what it should not."""

CHOICES = [
    *(f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))),
    *(f"{path.parts[0]}={Path(*path.parts[1:]).with_suffix('')}" for path in map(Path, USER_FILES)),
    "ac=nothing", "ac=null", "ac=3", "ac=[full,none]", "ac=", "ac=full.yaml", "ac='full'", "nothing=here",
    "+ac=full", "+extra=small", "+extra=nothing", "++ac=none", "ac@other=full", "+ac@other=full",
    "ac@ac=full", "~ac", "~ac=full", "~ac=none", "~sweep", "~extra", "~model", "ac/deep=below",
    "+ac/deep=below", "ac=../mesh/tp2", "hydra/launcher=basic", "+hydra/launcher=basic",
]  # fmt: skip
VALUES = [
    "seed=3", "seed=null", "seed=x", "seed=1,2", "seed='1,2'", "++x=range(1,3)", "++x=glob(*)", "seed=1e3",
    "sed=1", "+seed=1", "++seed=1", "+new=1", "++new=1", "~new", "~seed", "~seed=0", "~seed=1",
    "seed={a: 1}", "++seed={a: 1}", "model.dropout=0.1", "model.dropout=abc", "model={dropout: 0.2}",
    "+model={extra: 1}", "~model.dropout", "ac.early_stop=false", "++ac.early_stop=false",
    "+ac.early_stop=false", "~ac.early_stop", "ac.name=other", "++ac.whole.added=2", "ac.whole.dropout=0.3",
    "++ac.whole={b: 2}", "ac={name: none}", "++ac={a: {b: 1}}", "ac.module_classes=[A,B]",
    "+ac.module_classes=[C]", "ac.layers_fqn='${model.name}'", "++ac=${model}", "++ac.again=${..mesh.fsdp}",
    "mesh.fsdp=${nowhere}", "mesh.fsdp='${'", "++a.b.c=1", "++extra.size=5", r"++escaped='\${seed}'",
    r"++escaped=\${seed", "++copy.more=1", "copy.name=2", "++x=${seed},${seed}", "hydra.job.name=other",
    "++hydra.job.name=other", "~hydra", "hydra={}", "mesh.tp=${oc.env:HOME}", "name='a b'", "name=a=b", "=",
    "name", "~", "name=", "name=\"it's\"", r"++x='${oc.env:\'HOME\'}'", "++ac.tuple=[${seed},{a: ${name}}]",
]  # fmt: skip


@dataclass
class Schema:
    """Of an option in Hydra's store."""

    name: str = "none"
    layers_fqn: str = "layers"
    whole: Any = None


@dataclass(frozen=True, slots=True)
class Application:
    """Hydra's loader with the files of the program and of a user; full compositions are kept."""

    loader: ConfigLoaderImpl
    known: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def master(self, *overrides: str) -> DictConfig:
        return self.loader.load_configuration("config", list(overrides), run_mode=RunMode.MULTIRUN)

    def in_full(self, master: DictConfig, lines: Sequence[str]) -> Any:
        """Return what Hydra composes, or the exception that it raises."""
        key = (*master.hydra.overrides.hydra, "", *lines)
        if key not in self.known:
            self.known[key] = _outcome(lambda: _task_config(self.loader, master, lines))
        return self.known[key]


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
def application(user_dir: Path, _version_base: None) -> Application:
    path = create_config_search_path(str(CONF))
    path.prepend("command-line", f"file://{user_dir}", SearchPathQuery(provider="schema"))
    return Application(ConfigLoaderImpl(path))


POINTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(CHOICES), max_size=4), st.lists(st.sampled_from(VALUES), max_size=3)
    ).flatmap(lambda parts: st.permutations([*parts[0], *parts[1]])),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(points=POINTS)
def test_random_points(application: Application, points: list[list[str]]) -> None:
    assert_alike(application, points)


@pytest.mark.parametrize("preset", sorted(f"sweep={path.stem}" for path in (CONF / "sweep").glob("*.yaml")))
def test_presets_of_the_program(application: Application, preset: str) -> None:
    choices = (["ac=none", "mesh=tp2"], ["ac=full", "mesh=tp2"], ["ac=offload", "mesh=single"], ["model=mlp"])
    assert_alike(application, [[preset, *lines, "++ac.early_stop=false"] for lines in choices])


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_of_a_group(application: Application, group: str) -> None:
    options = [line for line in CHOICES if line.startswith(f"{group}=")]
    assert_alike(application, [["chunk=none", "shard=none", line, "seed=1"] for line in options])


def test_every_value_beside_a_choice(application: Application) -> None:
    assert_alike(application, [["mesh=tp2", line] for line in VALUES])


@pytest.mark.parametrize(
    "line", ["~ac", "~ac=none", "~ac=full", "+ac=none", "ac@other=full", "+ac@other=none", "ac={name: two}"]
)
@pytest.mark.parametrize("before", [[], ["ac=full"]], ids=["alone", "beside ac=full"])
def test_a_choice_that_is_more_than_an_option(application: Application, before: list[str], line: str) -> None:
    """What the point before it composed is no base for such a point."""
    master = application.master()
    points = [["ac=none"], [*before, line]]
    expected = [application.in_full(master, lines) for lines in points]
    found = _outcome(lambda: compose_all(application.loader, master, points))
    if isinstance(expected[1], DictConfig):
        assert [_described(config) for config in found] == [_described(config) for config in expected]
    else:
        assert _in_words(found) == _in_words(expected[1])


@pytest.mark.filterwarnings(r"ignore:\s*'ac/mine' is validated against ConfigStore schema:UserWarning")
@pytest.mark.parametrize("name", ["stored", "mine"])
def test_an_option_with_a_schema(application: Application, name: str) -> None:
    store = ConfigStore.instance()
    store.store(group="ac", name=name, node=Schema)
    try:
        stored = Application(application.loader)
        assert_alike(stored, [[f"ac={option}", "model=mlp"] for option in ("none", name, "full")])
    finally:
        store.repo["ac"].pop(f"{name}.yaml")


def test_values_apply_in_their_order(application: Application) -> None:
    values = ["ac.name=one", "ac={name: two}", "++ac.name=three"]
    assert_alike(application, [["ac=full", *order] for order in itertools.permutations(values)])


@pytest.mark.parametrize("preset", ["null", "writes", "merges", "copies", "chooses"])
def test_presets_of_a_user_with_choices(application: Application, preset: str) -> None:
    points = [
        [f"sweep={preset}", f"ac={ac}", f"mesh={mesh}", f"model={model}"]
        for model in ("mlp", "gpt_nano", "by_choice")
        for mesh in ("single", "shard2")
        for ac in ("none", "mine")
    ]
    assert_alike(application, points)


def test_a_search_path_of_the_command(user_dir: Path) -> None:
    application = Application(ConfigLoaderImpl(create_config_search_path(str(CONF))))
    master = application.master(f"hydra.searchpath=[file://{user_dir}]")
    assert_alike(application, [["ac=mine"], ["ac=heir"], ["ac=full"], ["ac=nothing"]], master)


def test_most_points_are_patched(application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """One full composition for everything plain, and one for each choice that is not."""
    composed: list[list[str]] = []
    in_full = ConfigLoaderImpl.load_sweep_config

    def load_sweep_config(self: ConfigLoaderImpl, master: DictConfig, overrides: list[str]) -> DictConfig:
        composed.append(overrides)
        return in_full(self, master, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", load_sweep_config)
    points = [
        [f"ac={ac}", f"mesh={mesh}", f"seed={seed}", "++ac.early_stop=false"]
        for seed in range(3)
        for ac in ("none", "full", "mine", "with_extra")
        for mesh in ("single", "shard2", "tp2")
    ]
    assert len(compose_all(application.loader, application.master(), points)) == len(points)
    assert composed == [["ac=none", "mesh=single"], ["ac=with_extra", "mesh=single"]]


def test_points_share_nothing(application: Application) -> None:
    first, second = compose_all(application.loader, application.master(), [["ac=full"], ["ac=full"]])
    first.ac.module_classes.append("Changed")
    first.model.dropout = 0.9
    assert (second.ac.module_classes, second.model.dropout) == ([], 0.0)


def test_files_are_read_anew_by_the_next_command(tmp_path: Path, user_dir: Path) -> None:
    folder = tmp_path / "user"
    shutil.copytree(user_dir, folder)
    path = create_config_search_path(str(CONF))
    path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    application = Application(ConfigLoaderImpl(path))
    for name in ("before", "after"):
        (folder / "ac" / "mine.yaml").write_text(f"name: {name}\n", "utf-8")
        composed = compose_all(application.loader, application.master(), [["ac=none"], ["ac=mine"]])
        assert [config.ac.name for config in composed] == ["none", name]


def test_the_first_wrong_point_is_refused(application: Application) -> None:
    with pytest.raises(ConfigCompositionException, match=r"^Could not override 'sed'\.\nTo append to your"):
        compose_all(application.loader, application.master(), [["seed=1"], ["sed=1"], ["lr=1"]])


def assert_alike(
    application: Application, points: Sequence[Sequence[str]], master: DictConfig | None = None
) -> None:
    """Compose `points` in both ways: those that compose at once, every other one by itself."""
    if master is None:
        master = application.master()
    expected = [application.in_full(master, lines) for lines in points]
    good = [index for index, outcome in enumerate(expected) if isinstance(outcome, DictConfig)]
    found = compose_all(application.loader, master, [points[index] for index in good])
    for index, config in zip(good, found, strict=True):
        assert _described(config) == _described(expected[index]), points[index]
    for lines, outcome in zip(points, expected, strict=True):
        if not isinstance(outcome, DictConfig):
            raised = _outcome(lambda lines=lines: compose_all(application.loader, master, [lines]))
            assert _in_words(raised) == _in_words(outcome), lines


def _task_config(loader: ConfigLoaderImpl, master: DictConfig, lines: Sequence[str]) -> DictConfig:
    config = loader.load_sweep_config(master, list(lines))
    with open_dict(config):
        del config["hydra"]
    return config


def _outcome(compose: Any) -> Any:
    try:
        return compose()
    except Exception as error:  # noqa: BLE001 (whatever Hydra raises is what is expected)
        return error


def _in_words(error: Any) -> tuple[str, ...]:
    return type(error).__name__, str(error), type(error.__cause__).__name__, str(error.__cause__)


def _described(config: DictConfig) -> tuple[Any, ...]:
    """Return everything that can be told about a configuration, but the time at which it was composed."""
    try:
        resolved: Any = OmegaConf.to_container(copy.deepcopy(config), resolve=True)
    except OmegaConfBaseException as error:
        resolved = _in_words(error)
    return _tree(config), resolved


def _tree(node: Any) -> tuple[Any, ...]:
    """Return a node as it is written, its keys in order, with its types and flags."""
    known = node._metadata
    about = (type(node).__name__, known.ref_type, known.object_type, known.optional, known.key, known.flags)
    content = node.__dict__["_content"] if isinstance(node, DictConfig) else node._value()
    if isinstance(content, dict):
        return *about, [(key, _tree(child)) for key, child in content.items()]
    return *about, repr(content)
