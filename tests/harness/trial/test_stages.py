from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.experiment.mesh import Mesh
from harness.models.base import Batch, ModelSpec
from harness.models.hf import HFSpec
from harness.trial.batches import batches
from harness.trial.elsewhere import Elsewhere
from harness.trial.plain_model import PlainModel
from harness.trial.precision import Precision
from harness.trial.stages import Cut, Stages
from strategies import StrategyError, generators
from strategies.regions.blocks import children_of
from tests.parity import cases

_CPU = torch.device("cpu")
_GPT = replace(cases.MODELS["gpt"], tied_head=False, n_layers=4)  # type: ignore[call-arg]  # of transformers
_SMALL = {"intermediate_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": False}
HF: dict[str, dict[str, Any]] = {
    "LlamaConfig": _SMALL,
    "Qwen3Config": _SMALL | {"head_dim": 8},
    "OlmoeConfig": _SMALL | {"num_experts": 4, "num_experts_per_tok": 2},
    "GPT2Config": {"tie_word_embeddings": False},
    "BertConfig": {"intermediate_size": 64, "tie_word_embeddings": False},
}
"""Models of `transformers` by their configuration."""


def _spec(name: str, **sizes: Any) -> ModelSpec:
    if name in HF:
        return HFSpec(
            name=name,
            layers_fqn={"GPT2Config": "transformer.h", "BertConfig": "bert.encoder.layer"}.get(
                name, "model.layers"
            ),
            vocab_size=64, config_class=name, n_layers=4, width=32, n_heads=4, overrides=HF[name],
        )  # fmt: skip
    known = cases.experiment(model=name, variant="none", batch_size=2, sequence_length=8).model
    spec = _GPT if name == "gpt" else replace(known, n_layers=4)  # type: ignore[call-arg]  # of transformers
    return replace(spec, **sizes)


def _of(name: str, **sizes: Any) -> tuple[PlainModel, ModelSpec, Batch]:
    known = "llama" if name in HF else name
    case = cases.experiment(model=known, variant="none", batch_size=2, sequence_length=8)
    case = replace(case, model=_spec(name, **sizes))
    return PlainModel.of(case, _CPU), case.model, batches(case, _CPU, 0)(0)


def _in_order(cut: Cut, plain: PlainModel, batch: Batch) -> Any:
    """Return what the stages give one after the other."""
    given: Any = None
    for index in range(len(cut.stages)):
        taken = (given,) if index else batch.inputs
        given = cut.stage(plain, index).model(*taken, **({} if index else batch.keywords))
        if index < len(cut.stages) - 1:
            between = cut.between(plain, _CPU)
            assert (given.shape, given.dtype) == (between.shape, between.dtype)
    return given


@pytest.mark.parametrize("name", ["llama", "gpt", "moe", "vit", *HF])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_one_after_the_other_are_the_model(name: str, schedule: str) -> None:
    plain, spec, batch = _of(name)
    cut = Cut.of(spec, plain, Mesh(pp=2, pp_schedule=schedule), batch)
    torch.manual_seed(0)
    whole = plain.model(*batch.inputs, **batch.keywords)
    torch.manual_seed(0)  # with dropout in GPT-2 and BERT, of which stages draw what the model draws
    given = _in_order(cut, plain, batch)
    if name in HF:
        whole, given = whole.logits, given.logits
    assert torch.equal(given, whole)


NAMES = [
    # model | the children or parameters that each of its two stages has
    ("gpt", ["embedding", "layers", "position"], ["head", "layers", "norm"]),
    ("vit", ["class_token", "layers", "patches", "position"], ["head", "layers", "norm"]),
    ("LlamaConfig", ["model.embed_tokens", "model.layers"], ["lm_head", "model.layers", "model.norm"]),
]


@pytest.mark.parametrize(("name", "first", "last"), NAMES)
def test_parameters_have_their_names_and_one_stage_each(name: str, first: list[str], last: list[str]) -> None:
    plain, spec, batch = _of(name)
    names = [name for name, _ in plain.model.named_parameters()]
    cut = Cut.of(spec, plain, Mesh(pp=2), batch)
    found = [[name for name, _ in cut.stage(plain, index).model.named_parameters()] for index in range(2)]
    assert sorted(name for each in found for name in each) == sorted(names)
    heads = [
        sorted({".".join(name.split(".")[: len(first[0].split("."))]) for name in each}) for each in found
    ]
    heads = [sorted({name.removesuffix(".weight") for name in each}) for each in heads]
    assert heads == [first, last]


@pytest.mark.parametrize(
    ("blocks", "pp", "shares"),
    [
        (4, 2, ["0 1", "2 3"]),
        (5, 2, ["0 1 2", "3 4"]),
        (7, 4, ["0 1", "2 3", "4 5", "6"]),
        (4, 4, ["0", "1", "2", "3"]),
    ],
)  # fmt: skip
def test_blocks_are_shared_evenly_and_the_first_stages_have_the_rest(
    blocks: int, pp: int, shares: list[str]
) -> None:
    plain, spec, batch = _of("llama", n_layers=blocks)
    cut = Cut.of(spec, plain, Mesh(pp=pp), batch)
    found = [cut.stage(plain, index) for index in range(pp)]
    assert [" ".join(name.removeprefix("layers.") for name in stage.units) for stage in found] == shares
    # who looks for blocks finds these, whatever stands in the places of the others
    assert [list(children_of(stage.model, "layers")) for stage in found] == [
        list(stage.units) for stage in found
    ]


def test_several_stages_of_a_rank_name_modules_as_the_whole_model_does() -> None:
    plain, spec, batch = _of("llama")
    mesh = Mesh(pp=2, pp_schedule="zbv")
    of_rank = Cut.of(spec, plain, mesh, batch).rank(plain, mesh, 0)
    both = dict(Stages([stage.model for stage in of_rank]).named_modules())
    blocks = {name for name in both if name.count(".") == 1 and name.startswith("layers.")}
    assert blocks == {"layers.0", "layers.3"}
    assert both["layers.3"] is plain.model.get_submodule("layers.3")
    assert both["embedding"].get_parameter("weight") is plain.model.get_parameter("embedding.weight")
    assert both["head"].get_parameter("weight") is plain.model.get_parameter("head.weight")
    assert [name for name, _ in Stages([each.model for each in of_rank]).named_buffers()] == ["rotary"]


def test_stages_that_ddp_holds_keep_the_names_of_the_whole_model() -> None:
    plain, spec, batch = _of("llama")
    mesh = Mesh(pp=2, pp_schedule="interleaved", dp_replicate=2)
    models = [stage.model for stage in Cut.of(spec, plain, mesh, batch).rank(plain, mesh, 0)]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        held = Stages([DistributedDataParallel(model) for model in models])
    finally:
        dist.destroy_process_group()
    expected = [name for name, _ in Stages(models).named_parameters()]
    assert [name for name, _ in held.named_parameters()] == expected
    assert [name for name, _ in held.named_buffers()] == ["rotary"]


def test_later_stages_compute_nothing_of_what_the_first_one_has() -> None:
    plain, spec, batch = _of("gpt", dropout=0.5)
    stage = Cut.of(spec, plain, Mesh(pp=2), batch).stage(plain, 1).model
    assert isinstance(vars(stage.get_submodule("embedding"))["weight"], Elsewhere)
    numbers = []
    for _ in range(2):
        torch.manual_seed(0)
        given = torch.zeros(2, 8, 32)
        for name in ("layers.2", "layers.3"):
            given = plain.model.get_submodule(name)(given)
        numbers.append(torch.get_rng_state())
        torch.manual_seed(0)
        stage(torch.zeros(2, 8, 32))
        numbers.append(torch.get_rng_state())
    assert all(torch.equal(each, numbers[0]) for each in numbers)


def test_to_be_cut_changes_no_state() -> None:
    plain, spec, batch = _of("gpt", dropout=0.5)
    before, names = generators.of_torch()[0].read(), list(plain.model.state_dict())
    Cut.of(spec, plain, Mesh(pp=2), batch)
    assert torch.equal(generators.of_torch()[0].read(), before)
    assert list(plain.model.state_dict()) == names
    assert not plain.model.get_submodule("layers.0")._forward_hooks


class _Toy(nn.Module):
    """A model whose forward is `run`."""

    def __init__(self, run: Callable[[_Toy, Tensor], Any]) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def _plainly(model: _Toy, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in model.layers:
        x = layer(x)
    return model.head(model.norm(x))  # type: ignore[no-any-return]


def _with_skip(model: _Toy, x: Tensor) -> Tensor:
    return model.head(model.stem(x) + _body(model, x))  # type: ignore[no-any-return]


def _body(model: _Toy, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in model.layers:
        x = layer(x)
    return x


def _with_residual(model: _Toy, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in model.layers:
        x = x + layer(x)
    return model.head(x)  # type: ignore[no-any-return]


def _deciding(model: _Toy, x: Tensor) -> Tensor:
    start = model.stem(x)
    x = start
    for layer in model.layers:
        x = layer(x)
    return model.head(x if start.sum() > 0 else -x)  # type: ignore[no-any-return]


def _backwards(model: _Toy, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in reversed(model.layers):  # type: ignore[call-overload]
        x = layer(x)
    return model.head(x)  # type: ignore[no-any-return]


def _twice(model: _Toy, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in (*model.layers, model.layers[0]):
        x = layer(x)
    return model.head(x)  # type: ignore[no-any-return]


def _some(model: _Toy, x: Tensor) -> Tensor:
    x = model.stem(x)
    for layer in model.layers[:3]:
        x = layer(x)
    return model.head(x)  # type: ignore[no-any-return]


def _tied(model: _Toy, x: Tensor) -> Tensor:
    return nn.functional.linear(_body(model, x), model.stem.weight)


def _scaled(model: _Toy, x: Tensor) -> Tensor:
    x = model.stem(x) * model.scale
    for layer in model.layers:
        x = layer(x)
    return model.head(x * model.scale)  # type: ignore[no-any-return]


_CANNOT = "model.pp_split: _Toy cannot be cut between its blocks: "
_REMEDY = "; use mesh.pp=1 without its options, or a model whose forward hands one tensor from block to block"
_ALONE = "model.pp_split: stage 1 of 2 cannot run alone: "
_ALONE_REMEDY = (
    ", which another stage has; use mesh.pp=1 without its options, or a model whose blocks read nothing of "
    "others but what the one before gives"
)
_BOTH = "model.pp_split: stages 0 and 1 both read"
_WEIGHT = "and a weight is in one stage; untie them, or use mesh.pp=1 without its options"
TOYS = [
    pytest.param(_with_residual, f"{_CANNOT}'layers.1' takes no tensor as 'layers.0' gives them{_REMEDY}",
                 id="computes between its blocks"),
    pytest.param(_twice, f"{_CANNOT}its forward calls 'layers.0' 2 times{_REMEDY}", id="calls a block twice"),
    pytest.param(_some, f"{_CANNOT}its forward does not call 'layers.3'{_REMEDY}", id="leaves a block out"),
    pytest.param(_with_skip, f"{_ALONE}what it gives follows from what the model takes{_ALONE_REMEDY}",
                 id="adds what the stem gives to what the blocks give"),
    pytest.param(_deciding, f"{_ALONE}__bool__ needs values of what the model takes{_ALONE_REMEDY}",
                 id="decides by a value of the stem"),
    pytest.param(_tied, f"{_BOTH} 'stem.weight', {_WEIGHT}",
                 id="reads a weight of the stem in the head"),
    pytest.param(_scaled, f"{_BOTH} 'scale', {_WEIGHT}",
                 id="reads a parameter of its own on both sides"),
]  # fmt: skip


def _toy(run: Callable[[_Toy, Tensor], Any]) -> tuple[PlainModel, ModelSpec, Batch]:
    torch.manual_seed(0)
    plain = PlainModel(
        model=(model := _Toy(run)),
        loss=lambda outputs, _batch: outputs.sum(),
        precision=Precision(asked="own", casts_buffers=False),
        units=children_of(model, "layers"),
    )
    return (
        plain,
        _ToySpec(name="toy", layers_fqn="layers", dropout=0.0),
        Batch(inputs=(torch.randn(3, 4),), targets=None),
    )


class _ToySpec(ModelSpec):
    def split_at(self) -> tuple[str, tuple[str, ...]]:
        return "model.pp_split", ("layers",)


@pytest.mark.parametrize("run", [_plainly, _backwards])
def test_forwards_that_call_their_blocks_in_turn_are_cut(run: Callable[[_Toy, Tensor], Any]) -> None:
    plain, spec, batch = _toy(run)
    cut = Cut.of(spec, plain, Mesh(pp=2), batch)
    assert torch.equal(_in_order(cut, plain, batch), plain.model(*batch.inputs))
    order = [name for share in cut.stages for name in share]
    names = [f"layers.{number}" for number in range(4)]
    assert order == (names[::-1] if run is _backwards else names)


@pytest.mark.parametrize(("run", "message"), TOYS)
def test_forwards_that_cannot_be_cut_are_refused(run: Callable[[_Toy, Tensor], Any], message: str) -> None:
    plain, spec, batch = _toy(run)
    with pytest.raises(StrategyError) as refusal:
        Cut.of(spec, plain, Mesh(pp=2), batch)
    assert str(refusal.value) == message


def test_stages_that_give_something_else_than_the_model_are_refused() -> None:
    calls: list[None] = []  # of which the stages together make two

    def run(model: _Toy, x: Tensor) -> Tensor:
        calls.append(None)
        return _plainly(model, x) + len(calls)

    plain, spec, batch = _toy(run)
    with pytest.raises(StrategyError) as refusal:
        Cut.of(spec, plain, Mesh(pp=2), batch)
    assert str(refusal.value) == (
        "model.pp_split: stages one after the other give something else than the whole model; use mesh.pp=1 "
        "without its options"
    )


def test_a_forward_that_calls_its_blocks_in_another_order_later_is_refused_then() -> None:
    is_later = False

    def run(model: _Toy, x: Tensor) -> Tensor:
        return (_backwards if is_later else _plainly)(model, x)

    plain, spec, batch = _toy(run)
    cut = Cut.of(spec, plain, Mesh(pp=2), batch)
    is_later = True
    with pytest.raises(StrategyError) as refusal:
        cut.stage(plain, 1).model(torch.randn(3, 4))
    assert str(refusal.value) == f"{_ALONE}what it gives follows from 'layers.0'{_ALONE_REMEDY}"


def test_fewer_blocks_than_stages_are_refused() -> None:
    plain, spec, batch = _of("llama", n_layers=2)
    with pytest.raises(StrategyError) as refusal:
        Cut.of(spec, plain, Mesh(pp=4), batch)
    assert str(refusal.value) == (
        "mesh.pp: makes 4 stages of 2 blocks, which leaves a stage without any; use fewer ranks or stages, "
        "or a model with more blocks"
    )
