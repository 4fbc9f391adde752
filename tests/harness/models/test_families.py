"""Every family at once: a new one is examined by being there."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch.utils has no public name for it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from harness.errors import ConfigError
from harness.models import Batch, LanguageModelSpec, ModelSpec, families
from harness.trial.parallel import STYLES, STYLES_OF_PARTS
from strategies.regions.block_search import search_blocks

MakeSpec = Callable[..., ModelSpec]
BatchOf = Callable[[ModelSpec], Batch]

CONF = Path(__file__).parents[3] / "conf" / "model"
OPTIONS = sorted(path.stem for path in CONF.glob("*.yaml"))
OURS = ["mlp", "gpt_nano", "llama_nano", "moe_nano"]
SMALL = [*OURS, "hf"]
DRAWING = ["vit_nano", "evoformer", "unet"]  # samples of their own
EVERY = [*SMALL, *DRAWING]
WITH_ATTENTION = ["gpt_nano", "llama_nano", "moe_nano", "hf"]


def logits_of(outputs: Any) -> Tensor:
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


@pytest.fixture
def batch_of(batch: Batch) -> BatchOf:
    """Return two samples for a model, bytes where it reads tokens."""

    def make(spec: ModelSpec) -> Batch:
        if isinstance(spec, LanguageModelSpec):
            return batch
        return spec.sample_batch(2, np.random.default_rng(1))

    return make


def seeded(spec: ModelSpec) -> nn.Module:
    torch.manual_seed(0)
    return spec.build()


def blocks_of(spec: ModelSpec, model: nn.Module) -> list[nn.Module]:
    """Return the blocks that the configuration names, or that are found where it names none."""
    layers_fqn = spec.layers_fqn
    if layers_fqn is None:
        found = search_blocks(model)
        assert found is not None
        layers_fqn = found.layers_fqn
    return list(model.get_submodule(layers_fqn).children())


def test_families_are_found_by_module_name() -> None:
    assert {name: spec.__name__ for name, spec in families().items()} == {
        "evoformer": "EvoformerSpec",
        "gpt": "GPTSpec",
        "hf": "HFSpec",
        "llama": "LlamaSpec",
        "mlp": "MLPSpec",
        "moe": "MoESpec",
        "python": "PythonSpec",
        "unet": "UNetSpec",
        "vit": "ViTSpec",
    }


def test_options_are_these() -> None:
    language = [
        "gpt_nano",
        "gpt_small",
        "hf",
        "hf_gpt2",
        "llama_1b",
        "llama_7b",
        "llama_nano",
        "mlp",
        "moe_nano",
        "python",
    ]
    assert sorted([*language, *DRAWING, "vit_large"]) == OPTIONS


def test_finding_the_families_imports_no_transformers() -> None:
    code = "import sys; from harness.models import families; families(); print('transformers' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=CONF.parents[1], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


@pytest.mark.parametrize("option", OPTIONS)
def test_configuration_has_exactly_the_fields_of_its_family(option: str) -> None:
    config = OmegaConf.load(CONF / f"{option}.yaml")
    fields = {field.name for field in dataclasses.fields(families()[config.family])}
    assert set(config) == fields | {"family"}
    assert config.name == option


@pytest.mark.parametrize("option", OPTIONS)
def test_configuration_has_the_types_of_its_family(option: str) -> None:
    config = OmegaConf.load(CONF / f"{option}.yaml")
    assert isinstance(config, DictConfig)
    if config.layers_fqn is None:
        config.layers_fqn = ""  # found before there is a spec
    schema = OmegaConf.structured(families()[config.pop("family")])
    merged = OmegaConf.merge(schema, config)
    assert OmegaConf.to_container(merged, resolve=True) == OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("option", [*EVERY, "gpt_small", "llama_1b", "vit_large"])
def test_builds_on_the_meta_device(make_spec: MakeSpec, option: str) -> None:
    with torch.device("meta"):
        model = make_spec(option).build()
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("option", "parameters"),
    [
        ("mlp", 592_640),
        ("gpt_nano", 957_184),
        ("gpt_small", 124_439_808),
        ("llama_nano", 853_120),
        ("llama_1b", 1_235_814_400),
        ("llama_7b", 6_738_415_616),
        ("moe_nano", 1_444_992),
        ("vit_nano", 809_354),
        ("vit_large", 304_715_752),
        ("evoformer", 3_700_055),
        ("unet", 944_051),
    ],
)
def test_number_of_parameters(make_spec: MakeSpec, option: str, parameters: int) -> None:
    with torch.device("meta"):
        model = make_spec(option).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("option", EVERY)
def test_the_seed_determines_the_weights(make_spec: MakeSpec, option: str) -> None:
    spec = make_spec(option)
    first, second = seeded(spec), seeded(spec)
    torch.manual_seed(1)
    other = spec.build()
    tensors = [
        dict(model.named_parameters()) | dict(model.named_buffers()) for model in (first, second, other)
    ]
    assert tensors[0].keys() == tensors[1].keys() == tensors[2].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert any(not torch.equal(tensors[0][name], tensors[2][name]) for name in tensors[0])


ATTENTION_NORM = ["attention_norm.weight"]
BIAS_FREE_ATTENTION = [f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")]
ROTARY_BLOCK = [*ATTENTION_NORM, *BIAS_FREE_ATTENTION, "feed_forward_norm.weight"]
SWIGLU = ["gate.weight", "up.weight", "down.weight"]
STATE = {
    "mlp": (
        ["embedding.weight", "head.weight", "head.bias"],
        ["up.weight", "up.bias", "down.weight", "down.bias"],
    ),
    "gpt_nano": (
        ["embedding.weight", "position.weight", "norm.weight", "norm.bias"],
        [
            f"{module}.{kind}"
            for module in (
                "attention_norm",
                *(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),
                "feed_forward_norm",
                "feed_forward.up",
                "feed_forward.down",
            )
            for kind in ("weight", "bias")
        ],
    ),
    "llama_nano": (
        ["embedding.weight", "norm.weight", "head.weight"],
        [*ROTARY_BLOCK, *(f"feed_forward.{name}" for name in SWIGLU)],
    ),
    "moe_nano": (
        ["embedding.weight", "norm.weight", "head.weight"],
        [
            *ROTARY_BLOCK,
            "feed_forward.router.weight",
            *(f"feed_forward.experts.{expert}.{name}" for expert in range(4) for name in SWIGLU),
        ],
    ),
}


@pytest.mark.parametrize("option", OURS)
def test_names_in_the_state(make_spec: MakeSpec, option: str) -> None:
    outside, block = STATE[option]
    expected = [*outside, *(f"layers.{layer}.{name}" for layer in range(4) for name in block)]
    assert sorted(make_spec(option).build().state_dict()) == sorted(expected)


@pytest.mark.parametrize(
    ("option", "model", "block"),
    [
        ("mlp", "MLP", "MLPBlock"),
        ("gpt_nano", "GPT", "GPTBlock"),
        ("llama_nano", "Llama", "LlamaBlock"),
        ("moe_nano", "MoE", "MoEBlock"),
        ("hf", "GPT2LMHeadModel", "GPT2Block"),
        ("vit_nano", "ViT", "ViTBlock"),
        ("evoformer", "Evoformer", "EvoformerBlock"),
        ("unet", "UNet", "ResidualBlock"),
    ],
)
def test_layers_fqn_names_the_blocks(make_spec: MakeSpec, option: str, model: str, block: str) -> None:
    spec = make_spec(option)
    built = spec.build()
    assert type(built).__name__ == model
    assert {type(child).__name__ for child in blocks_of(spec, built)} == {block}


@pytest.mark.parametrize("option", SMALL)
def test_logits_have_the_shape_of_the_tokens_and_the_vocabulary(
    make_spec: MakeSpec, batch: Batch, option: str
) -> None:
    assert logits_of(seeded(make_spec(option))(*batch.inputs)).shape == (2, 16, 256)


@pytest.mark.parametrize("option", SMALL)
def test_an_untrained_model_knows_nothing(make_spec: MakeSpec, batch: Batch, option: str) -> None:
    spec = make_spec(option)
    loss = spec.loss(seeded(spec)(*batch.inputs), batch)
    assert loss.shape == ()
    assert abs(loss.item() - math.log(256)) < 0.1


@pytest.mark.parametrize("option", EVERY)
def test_every_parameter_gets_a_gradient(make_spec: MakeSpec, batch_of: BatchOf, option: str) -> None:
    spec = make_spec(option)
    batch = batch_of(spec)
    model = seeded(spec)
    spec.loss(model(*batch.inputs), batch).backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("option", EVERY)
def test_inputs_of_blocks_require_gradients(make_spec: MakeSpec, batch_of: BatchOf, option: str) -> None:
    spec = make_spec(option)
    batch = batch_of(spec)
    model = seeded(spec)
    seen: list[bool] = []
    for block in blocks_of(spec, model):
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].requires_grad))
    model(*batch.inputs)
    assert seen == [True] * len(seen)
    assert seen


@pytest.mark.parametrize("option", EVERY)
def test_dropout_acts_in_training_only(make_spec: MakeSpec, batch_of: BatchOf, option: str) -> None:
    plain, dropping = make_spec(option, dropout=0.0), make_spec(option, dropout=0.1)
    batch = batch_of(plain)
    model, dropped = seeded(plain), seeded(dropping)
    trained = [dropping.loss(dropped(*batch.inputs), batch).item() for _ in range(2)]
    expected = plain.loss(model(*batch.inputs), batch).item()
    assert len({*trained, expected}) == 3
    assert dropping.loss(dropped.eval()(*batch.inputs), batch).item() == expected


@pytest.mark.parametrize("option", SMALL)
def test_logits_do_not_depend_on_later_tokens(make_spec: MakeSpec, batch: Batch, option: str) -> None:
    model = seeded(make_spec(option)).eval()
    changed = batch.inputs[0].clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    before, after = logits_of(model(*batch.inputs)), logits_of(model(changed))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("option", WITH_ATTENTION)
def test_logits_depend_on_earlier_tokens(make_spec: MakeSpec, batch: Batch, option: str) -> None:
    model = seeded(make_spec(option)).eval()
    changed = batch.inputs[0].clone()
    changed[:, 0] = (changed[:, 0] + 1) % 256
    assert not torch.equal(logits_of(model(*batch.inputs))[:, -1], logits_of(model(changed))[:, -1])


class CountFlops(TorchDispatchMode):
    """Counts matmuls and attention, CPU flash attention too, for which torch has no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            batch, heads, length, head_width = args[0].shape
            self.flops += 4 * batch * heads * length * length * head_width
        elif func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=outputs)
        return outputs


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["flash attention", "math attention"])
@pytest.mark.parametrize("option", [*OURS, *DRAWING])
def test_flops_are_those_of_the_operators(
    make_spec: MakeSpec, batch_of: BatchOf, option: str, dropout: float
) -> None:
    spec = make_spec(option, dropout=dropout)
    model = seeded(spec)
    with CountFlops() as counted:
        model(*batch_of(spec).inputs)
    assert spec.flops_per_sample(16) == counted.flops / 2


def test_flops_per_token_of_gpt2_small(make_spec: MakeSpec) -> None:
    spec = make_spec("gpt_small")
    assert isinstance(spec, LanguageModelSpec)
    layer = 8 * 768**2 + 4 * 1024 * 768 + 4 * 768 * 3072
    assert spec.flops_per_token(1024) == 12 * layer + 2 * 768 * 50257


def test_flops_of_others_are_unknown(make_spec: MakeSpec) -> None:
    assert make_spec("hf").flops_per_sample(16) is None
    assert make_spec("python", factory="package:make").flops_per_sample(16) is None


@pytest.mark.parametrize("option", DRAWING)
def test_drawn_samples_are_those_of_the_random_numbers(make_spec: MakeSpec, option: str) -> None:
    spec = make_spec(option)
    first, second, other = (spec.sample_batch(3, np.random.default_rng(seed)) for seed in (0, 0, 1))
    leaves = [pytree.tree_leaves((each.inputs, each.targets)) for each in (first, second, other)]
    assert [len(tensor) for tensor in leaves[0]] == [3] * len(leaves[0])
    assert all(torch.equal(*pair) for pair in zip(leaves[0], leaves[1], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(leaves[0], leaves[2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", DRAWING)
def test_outputs_have_the_type_of_the_weights_and_the_loss_is_exact(
    make_spec: MakeSpec, batch_of: BatchOf, option: str, dtype: torch.dtype
) -> None:
    spec = make_spec(option)
    batch = batch_of(spec)
    outputs = seeded(spec).to(dtype)(*batch.inputs)
    assert {tensor.dtype for tensor in pytree.tree_leaves(outputs)} == {dtype}
    assert spec.loss(outputs, batch).dtype == torch.float32


@pytest.mark.parametrize("option", [*OURS, "vit_nano"])
def test_tensor_parallel_plan_names_every_linear_of_the_blocks_but_routers(
    make_spec: MakeSpec, option: str
) -> None:
    spec = make_spec(option)
    model = spec.build()
    linears = {
        "layers.*." + fqn
        for fqn, module in model.get_submodule("layers.0").named_modules()
        if isinstance(module, nn.Linear) and not fqn.endswith("router")
    }
    expected = {
        fqn.replace("experts.0", "experts.*") for fqn in linears if "experts.0" in fqn or "experts" not in fqn
    }
    plan = spec.tensor_parallel_plan()
    assert set(plan) == expected
    assert {fqn for fqn, style in plan.items() if style == "row"} == {
        fqn for fqn in expected if fqn.endswith((".wo", ".down"))
    }


@pytest.mark.parametrize(
    ("option", "tied_head"), [("gpt_nano", None), ("llama_nano", True), ("llama_nano", False)]
)
@pytest.mark.parametrize("loss_parallel", [True, False])
def test_a_plan_of_parts_names_modules_and_known_styles(
    make_spec: MakeSpec, option: str, *, tied_head: bool | None, loss_parallel: bool
) -> None:
    spec = make_spec(option, **({} if tied_head is None else {"tied_head": tied_head}))
    with torch.device("meta"):
        names = {re.sub(r"\.\d+", ".*", name) for name, _ in spec.build().named_modules()}
    plan = spec.split_plan(sp=True, loss_parallel=loss_parallel and tied_head is False)
    assert set(plan) <= names
    assert set(plan.values()) <= {*STYLES, *STYLES_OF_PARTS}
    assert set(spec.tensor_parallel_plan()) < set(plan)


@pytest.mark.parametrize(
    ("option", "sequence_length", "tp"),
    [
        ("gpt_nano", 1024, 4),
        ("llama_nano", 1024, 2),
        ("moe_nano", 1024, 2),
        ("mlp", 1 << 20, 4),
        ("hf", 1024, 1),
        ("vit_nano", 1 << 20, 4),
        ("evoformer", 1 << 20, 1),
        ("unet", 1 << 20, 1),
    ],
)
def test_check_accepts(make_spec: MakeSpec, option: str, sequence_length: int, tp: int) -> None:
    make_spec(option).check(sequence_length=sequence_length, tp=tp)


@pytest.mark.parametrize(
    ("option", "sequence_length", "tp", "message"),
    [
        pytest.param(
            "gpt_nano",
            1025,
            1,
            "sequence_length: must be at most 1024, the positions of 'gpt_nano', got 1025",
            id="more tokens than learned positions",
        ),
        pytest.param(
            "llama_nano",
            1025,
            1,
            "sequence_length: must be at most 1024, the positions of 'llama_nano', got 1025",
            id="more tokens than rotary positions",
        ),
        pytest.param(
            "hf",
            1025,
            1,
            "sequence_length: must be at most 1024, the positions of 'hf', got 1025",
            id="more tokens than a transformers model has positions",
        ),
        pytest.param(
            "gpt_nano",
            16,
            3,
            "mesh.tp: must divide model.n_heads, 4, got 3",
            id="ranks do not divide the heads",
        ),
        pytest.param(
            "llama_nano",
            16,
            4,
            "mesh.tp: must divide model.n_kv_heads, 2, got 4",
            id="ranks do not divide the key-value heads",
        ),
        pytest.param(
            "mlp",
            16,
            3,
            "mesh.tp: must divide model.hidden_width, 512, got 3",
            id="ranks do not divide the hidden width",
        ),
        pytest.param(
            "hf",
            16,
            2,
            "mesh.tp: model 'hf' has no tensor parallel plan, got 2; "
            "name linears with model.tp_column and model.tp_row, or use 1 without its options",
            id="GPT-2 has no plan",
        ),
        pytest.param(
            "vit_nano",
            16,
            3,
            "mesh.tp: must divide model.n_heads, 4, got 3",
            id="ranks do not divide the heads of patches",
        ),
        pytest.param(
            "unet",
            16,
            2,
            "mesh.tp: model 'unet' has no tensor parallel plan, got 2; use 1 without its options",
            id="convolutions have no plan",
        ),
    ],
)
def test_check_refuses(make_spec: MakeSpec, option: str, sequence_length: int, tp: int, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec(option).check(sequence_length=sequence_length, tp=tp)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("option", "changes", "message"),
    [
        ("gpt_nano", {"dropout": 1.0}, "model.dropout: must be in [0, 1), got 1.0"),
        ("gpt_nano", {"dropout": -0.1}, "model.dropout: must be in [0, 1), got -0.1"),
        ("gpt_nano", {"n_layers": 0}, "model.n_layers: must be at least 1, got 0"),
        ("gpt_nano", {"vocab_size": 0}, "model.vocab_size: must be at least 1, got 0"),
        ("gpt_nano", {"n_heads": 3}, "model.n_heads: must divide model.width, 128, got 3"),
        ("mlp", {"hidden_width": 0}, "model.hidden_width: must be at least 1, got 0"),
        ("llama_nano", {"n_kv_heads": 3}, "model.n_kv_heads: must divide model.n_heads, 4, got 3"),
        (
            "llama_nano",
            {"n_heads": 128},
            "model.n_heads: heads must be of even width, got width 128 / 128 heads",
        ),
        ("llama_nano", {"n_heads": 6}, "model.n_heads: heads must be of even width, got width 128 / 6 heads"),
        ("moe_nano", {"top_k": 0}, "model.top_k: must be at least 1, got 0"),
        ("moe_nano", {"top_k": 5}, "model.top_k: must be at most model.n_experts, 4, got 5"),
        (
            "moe_nano",
            {"n_heads": 128},
            "model.n_heads: heads must be of even width, got width 128 / 128 heads",
        ),
    ],
)
def test_shapes_that_are_refused(
    make_spec: MakeSpec, option: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec(option, **changes)
    assert str(refusal.value) == message


def test_a_batch_moves_with_everything_in_it() -> None:
    batch = Batch(inputs=({"image": torch.ones(2)}, 3), targets=None)
    moved = batch.to(torch.device("meta"))
    assert moved.inputs[0]["image"].device.type == "meta"
    assert (moved.inputs[1], moved.targets) == (3, None)


def test_rows_of_a_batch_have_memory_of_their_own() -> None:
    tokens = torch.arange(20).view(4, 5)
    rows = Batch(inputs=(tokens[:, :-1], "as it is"), targets=(tokens[:, 1:],)).rows(1, 2)
    assert rows.inputs[0].tolist() == [[5, 6, 7, 8], [10, 11, 12, 13]]
    assert rows.targets[0].tolist() == [[6, 7, 8, 9], [11, 12, 13, 14]]
    assert rows.inputs[1] == "as it is"
    assert [tensor.untyped_storage().nbytes() for tensor in (rows.inputs[0], rows.targets[0])] == [64, 64]
