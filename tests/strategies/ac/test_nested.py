"""nested: its options, what it observes, and the models people have."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional

from harness.models import ModelSpec, families
from strategies import StrategyError
from strategies.ac.nested import Nested
from strategies.regions.region import regions
from tests.strategies.nested.examination import Calls, different, step
from tests.strategies.toys import Layers, toy, train_step

CONF = Path(__file__).parents[3] / "conf" / "model"
PATH = "must be an index, a list of indices or null, got {}; indices are whole numbers from 0"
LEVELS = "ac.levels: must be a list of numbers of regions, each at least 1, got {}"
LABELS = "ac.labels: must be a mapping from submodules to paths, got {}"
OFFLOAD = "ac.offload: must be a mapping from all, inputs, internals to lists of paths, got {}"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "labels and levels": (
        {"labels": {"a": 0}, "levels": [1]},
        "ac.levels: must be null where ac.labels is given",
    ),
    "labels and a file": (
        {"labels": {"a": 0}, "labels_file": "x.yaml"},
        "ac.labels_file: must be null where ac.labels is given",
    ),
    "levels and a file": (
        {"levels": [1], "labels_file": "x.yaml"},
        "ac.labels_file: must be null where ac.levels is given",
    ),
    "no levels": ({"levels": []}, LEVELS.format("[]")),
    "a number for levels": ({"levels": 2}, LEVELS.format("2")),
    "words for levels": ({"levels": "22"}, LEVELS.format("'22'")),
    "a level of nothing": ({"levels": [2, 0]}, LEVELS.format("[2, 0]")),
    "a switch for a level": ({"levels": [True]}, LEVELS.format("[True]")),
    "half a region": ({"levels": [1.5]}, LEVELS.format("[1.5]")),
    "no labels": ({"labels": {}}, LABELS.format("{}")),
    "a list of labels": ({"labels": [0]}, LABELS.format("[0]")),
    "a fraction for a submodule": (
        {"labels": {2.1: 0}},
        "ac.labels: must name submodules in words, got 2.1; quote such names in a file, ac.labels_file",
    ),
    "a word for a path": ({"labels": {"a": "0"}}, f"ac.labels.a: {PATH.format(repr('0'))}"),
    "a number behind null": (
        {"labels": {"a": [None, 0]}},
        "ac.labels.a: must not continue behind null, got [None, 0]; null only pads the end",
    ),
    "paths without a kind": ({"offload": [[0]]}, OFFLOAD.format("[[0]]")),
    "another kind": ({"offload": {"outputs": [0]}}, OFFLOAD.format("{'outputs': [0]}")),
    "a number of offloaded regions": (
        {"offload": {"all": 0}},
        "ac.offload.all: must be a list of paths, got 0",
    ),
    "a word for an offloaded region": (
        {"offload": {"all": ["0_1"]}},
        f"ac.offload.all: {PATH.format(repr('0_1'))}",
    ),
    "a region offloaded twice": (
        {"offload": {"all": [[0, 1]], "inputs": [[0, 1]]}},
        "ac.offload.inputs: region 0_1 is in all already; name it once",
    ),
    "internals of what is recomputed": (
        {"offload": {"internals": [0]}},
        (
            "ac.offload.internals: region 0 is recomputed, its internals are not saved and cannot move; "
            "name it in ac.keep too, or use inputs"
        ),
    ),
    "a number of kept regions": ({"keep": 0}, "ac.keep: must be a list of paths, got 0"),
    "a kept region that stays": (
        {"keep": [[0, 1]]},
        "ac.keep: region 0_1 would be neither recomputed nor offloaded; name it in ac.offload too",
    ),
    "a word for a switch": ({"early_stop": "no"}, "ac.early_stop: must be bool, got 'no'"),
    "a number for a file": ({"labels_file": 3}, "ac.labels_file: must be str or None, got 3"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_of_an_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        Nested(**options)
    assert str(error.value) == message


UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no container of blocks": (
        {"levels": [1]},
        "ac.layers_fqn: is empty; name the module that holds the blocks, containers are: layers",
    ),
    "more regions than blocks": (
        {"layers_fqn": "layers", "levels": [4]},
        "ac.levels: [4] asks for 4 regions of 3 blocks; every region needs one block at least",
    ),
    "more inner regions than blocks": (
        {"layers_fqn": "layers", "levels": [2, 2]},
        "ac.levels: [2] asks for 2 regions of 1 blocks; every region needs one block at least",
    ),
    "a submodule that is not there": (
        {"labels": {"layers.3": 0}},
        (
            "ac.labels: 'layers.3' names no submodule; submodules are: embedding, layers, layers.0, "
            "layers.0.norm, layers.0.qkv, layers.0.out, layers.0.up, layers.0.down and 16 more"
        ),
    ),
    "a region to offload that is not there": (
        {"layers_fqn": "layers", "levels": [2], "offload": {"inputs": [[0], [1, 0]]}},
        "ac.offload: there is no region 1_0; regions are: 0, 1",
    ),
    "a region to keep that is not there": (
        {"labels": {"head": None}, "offload": {"all": [3]}, "keep": [3]},
        "ac.keep: there is no region 3; regions are: none",
    ),
}


@pytest.mark.parametrize(("options", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_refusal_of_a_model(options: dict[str, Any], message: str) -> None:
    model = toy()
    with pytest.raises(StrategyError) as error:
        Nested(**options).apply(model, (torch.zeros(2, 8, dtype=torch.int64),))
    assert str(error.value) == message
    assert regions(model) == {}


def test_a_block_that_torch_checkpoints_already_is_refused() -> None:
    model = toy()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    with pytest.raises(StrategyError) as error:
        Nested(layers_fqn="layers").apply(model)
    assert str(error.value) == "ac: 'layers.1' is already checkpointed; apply one variant to a model"


SAME: dict[str, dict[str, Any]] = {
    "the default": {"layers_fqn": "layers"},
    "levels": {"levels": [2, 2]},
    "ragged labels": {"labels": {"a": 0, "b": [1, None], "c": None, "d": [1, 2, 3]}},
    "offloading": {"levels": [2], "offload": {"all": [0], "inputs": [[1]]}, "keep": [0]},
    "switches": {"early_stop": False, "preserve_rng_state": False},
}


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
def test_a_trial_is_the_same_when_it_is_read_again(options: dict[str, Any]) -> None:
    nested = Nested(**options)
    assert Nested(**asdict(nested)) == nested


def test_labels_of_a_file_become_labels(tmp_path: Path) -> None:
    file = tmp_path / "labels.yaml"
    file.write_text("layers.0: 0\nlayers.1: [0, 1, null]\nlayers.2: null\n", encoding="utf-8")
    labels = {"layers.0": 0, "layers.1": [0, 1], "layers.2": None}
    assert Nested(labels_file=str(file)) == Nested(labels=labels)
    assert asdict(Nested(labels_file=str(file)))["labels_file"] is None


FILES: dict[str, tuple[bytes, str]] = {
    "no mapping": (b"- 0", LABELS.format("[0]")),
    "nothing": (b"", "ac.labels_file: is empty; it must hold a mapping from submodules to paths"),
    "no path": (b"a: x", f"ac.labels.a: {PATH.format(repr('x'))}"),
    "no YAML": (
        b"a: [0",
        (
            'ac.labels_file: cannot be read: while parsing a flow sequence in "<unicode string>", line 1, '
            "column 4: a: [0 ^ expected ',' or ']', but got '<stream end>' in \"<unicode string>\", line 1, "
            "column 6: a: [0 ^"
        ),
    ),
    "no text": (
        b"\xff",
        (
            "ac.labels_file: cannot be read: "
            "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
        ),
    ),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_refusal_of_a_file(text: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "labels.yaml"
    file.write_bytes(text)
    with pytest.raises(StrategyError) as error:
        Nested(labels_file=str(file))
    assert str(error.value) == message


def test_refusal_of_a_file_that_is_not_there() -> None:
    with pytest.raises(StrategyError) as error:
        Nested(labels_file="nowhere.yaml")
    assert str(error.value) == (
        "ac.labels_file: cannot be read: [Errno 2] No such file or directory: 'nowhere.yaml'"
    )


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


ROOTS: dict[int, list[int]] = {1: [2], 2: [3, 3], 3: [3, 3, 3], 4: [3, 3, 3, 3], 5: [3] * 5, 9: [3] * 9}


@pytest.mark.parametrize(("count", "calls"), ROOTS.items(), ids=[f"{count} blocks" for count in ROOTS])
def test_the_default_is_the_square_root(count: int, calls: list[int]) -> None:
    model = Nested(layers_fqn="layers", early_stop=False).apply(Layers(*linears(count)))
    counted = Calls(model, nn.Linear)
    step(model, torch.ones(2, 4))
    assert [counted[f"layers.{at}"] for at in range(count)] == calls


def test_what_is_observed_is_the_tree_and_what_moved() -> None:
    nested = Nested(
        layers_fqn="layers", levels=[1, 3], offload={"inputs": [[0], [0, 1]], "all": [[0, 2]]}, keep=[[0, 2]]
    )
    model = nested.apply(toy())
    assert nested.observe(model).plan is None
    train_step(model)
    observed = nested.observe(model)
    assert observed.plan is not None
    (outer,) = observed.plan["regions"]
    known = {
        "region": "0",
        "first": "layers.0",
        "last": "layers.2",
        "calls": 3,
        "recomputed": True,
        "offload": "inputs",
    }
    assert {name: outer[name] for name in known} == known
    named = [(each["region"], each["recomputed"], each["offload"]) for each in outer["regions"]]
    assert named == [("0_0", True, None), ("0_1", True, "inputs"), ("0_2", False, "all")]
    moved = [each["moved_bytes"] for each in (outer, *outer["regions"])]
    assert sum(moved) == observed.offloaded_bytes


def test_offloading_composes_with_recomputation() -> None:
    plain, model = toy(), toy()
    nested = Nested(layers_fqn="layers", levels=[1, 3], offload={"inputs": [[0, 1]], "all": [[0]]})
    nested.apply(model)
    for _ in range(2):
        expected, actual = train_step(plain), train_step(model)
        assert torch.equal(expected.loss, actual.loss)
        assert torch.equal(expected.rng_state, actual.rng_state)
        for name, gradient in expected.gradients.items():
            assert gradient is not None
            assert torch.equal(gradient, actual.gradients[name]), name  # type: ignore[arg-type]


def spec_of(option: str, **changes: Any) -> ModelSpec:
    config = OmegaConf.merge(OmegaConf.load(CONF / f"{option}.yaml"), changes)
    values: Any = OmegaConf.to_container(config, resolve=True)
    return families()[values.pop("family")](**values)


GPT2 = {"layers_fqn": "transformer.h", "dropout": 0.1, "overrides": {"n_layer": 4, "n_embd": 32, "n_head": 2}}
LLAMA = {
    "config_class": "LlamaConfig",
    "layers_fqn": "model.layers",
    "dropout": 0.1,
    "overrides": {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"dropout": 0.1}),
    "gpt": ("gpt_nano", {"dropout": 0.1, "width": 32, "n_heads": 2}),
    "llama": ("llama_nano", {"dropout": 0.1, "width": 32, "n_heads": 4, "n_kv_heads": 2}),
    "moe": ("moe_nano", {"dropout": 0.1, "width": 32, "n_heads": 4, "n_kv_heads": 2}),
    "GPT-2 of transformers": ("hf", GPT2),
    "Llama of transformers": ("hf", LLAMA),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "the default": {},
    "two levels": {"levels": [1, 2]},
    "to the end": {"levels": [1, 2], "early_stop": False},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("option", "changes"), MODELS.values(), ids=MODELS)
def test_parity_with_dropout(option: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    spec = spec_of(option, **changes)
    torch.manual_seed(0)
    plain = spec.build().train()
    model = Nested(layers_fqn=spec.layers_fqn, **options).apply(copy.deepcopy(plain))
    blocks = list(model.get_submodule(spec.layers_fqn).children())
    counted = Calls(model, type(blocks[0]))
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert different(step(plain, tokens), step(model, tokens)) == []
    if options.get("early_stop") is False:
        inside = [fqn for fqn in counted.counts if fqn.startswith(f"{spec.layers_fqn}.")]
        assert [counted[fqn] for fqn in inside] == [2 * (1 + 2)] * len(blocks)


INSIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt": (
        *MODELS["gpt"],
        {"layers.0.attention": 0, "layers.1": 1, "layers.1.feed_forward": [1, 0], "layers.2": 1},
    ),
    "llama": (
        *MODELS["llama"],
        {
            "layers.0.attention_norm": [0, 0],
            "layers.0.attention": [0, 1],
            "layers.1": 1,
            "layers.1.feed_forward": [1, 0],
        },
    ),
    "moe": (*MODELS["moe"], {"layers.0.feed_forward": 0, "layers.1": 1, "layers.1.feed_forward": [1, 2]}),
    "GPT-2 of transformers": (
        "hf",
        GPT2,
        {
            "transformer.h.0.mlp": 0,
            "transformer.h.1": 0,
            "transformer.h.1.attn": [0, 0],
            "transformer.h.2.ln_1": 0,
            "transformer.h.2.attn": 0,
            "transformer.h.3.mlp.c_fc": 5,
        },
    ),
    "Llama of transformers": (
        "hf",
        LLAMA,
        {
            "model.layers.0.self_attn": 0,
            "model.layers.1": 1,
            "model.layers.1.mlp": [1, 0],
            "model.layers.2": 1,
            "model.layers.3.mlp.act_fn": 2,
        },
    ),
}


@pytest.mark.parametrize(("option", "changes", "labels"), INSIDE.values(), ids=INSIDE)
def test_parity_with_labels_inside_blocks(
    option: str, changes: dict[str, Any], labels: dict[str, Any]
) -> None:
    spec = spec_of(option, **changes)
    torch.manual_seed(0)
    plain = spec.build().train()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    model = Nested(labels=labels, early_stop=False).apply(copy.deepcopy(plain), (tokens,))
    counted = Calls(model, labels)
    assert different(step(plain, tokens), step(model, tokens)) == []
    expected = {fqn: 1 + (1 if isinstance(path, int) else len(path)) for fqn, path in labels.items()}
    assert {fqn: counted[fqn] for fqn in labels} == expected


TABLE: dict[int, Tensor] = {}


class Remembers(nn.Module):
    """A block that keeps a table in a global, and counts in an object that nobody copies."""

    def __init__(self, seen: Iterator[int]) -> None:
        super().__init__()
        self.seen = seen
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        next(self.seen)
        if x.shape[-1] not in TABLE:
            TABLE[x.shape[-1]] = torch.ones(x.shape[-1])
        y: Tensor = self.linear(x) * TABLE[x.shape[-1]]
        return y.tanh()


def test_nothing_runs_before_the_first_forward() -> None:
    TABLE.clear()
    seen = iter(range(9))
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(Remembers(seen), Remembers(seen))))
    sample = torch.ones(2, 4)
    Nested(layers_fqn="layers").apply(model, (sample,))
    assert (next(seen), TABLE) == (0, {})
    model(sample).sum().backward()
    assert type(TABLE[4]) is Tensor


class Twice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_blocks_that_are_called_again_are_refused_in_the_words_of_their_option() -> None:
    model = Nested(layers_fqn="layers").apply(Twice(*linears(4)))
    with pytest.raises(StrategyError) as error:
        model(torch.ones(2, 4))
    assert str(error.value) == (
        "ac.levels: region 0 ends at 'layers.1' and begins again at 'layers.0'; 'layers.2', 'layers.3' stand "
        "between: use ac.levels=[1], which is one region of all, or say by ac.labels what is in a region"
    )
    one = Nested(layers_fqn="layers", levels=[1]).apply(Twice(*linears(4)))
    one(torch.ones(2, 4)).sum().backward()


def test_a_number_names_a_submodule() -> None:
    assert Nested(labels={0: 1}).labels == {"0": [1]}


@pytest.mark.parametrize("name", ["GPT-2 of transformers", "Llama of transformers"])
def test_attention_gets_the_mask_that_it_gets_without_regions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    attention = functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs.get("attn_mask") is None, bool(kwargs.get("is_causal"))))
        return attention(*args, **kwargs)

    option, changes = MODELS[name]
    spec = spec_of(option, **changes)
    plain, nested = spec.build(), spec.build()
    Nested(layers_fqn=spec.layers_fqn, levels=[1], early_stop=False).apply(nested)
    tokens_BS = torch.zeros(2, 16, dtype=torch.int64)
    nested(tokens_BS).logits.sum().backward()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    plain(tokens_BS).logits.sum().backward()
    expected, seen[:] = list(seen), []
    nested(tokens_BS).logits.sum().backward()
    assert expected[0] == (True, True)
    assert seen == 2 * expected
