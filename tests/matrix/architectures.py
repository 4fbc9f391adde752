"""Models of other people: small architectures of four libraries, with random weights and without dropout.

python -m pip install transformers timm torchvision diffusers
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from harness.models.base import Batch

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers")
"""Whose models there are."""

Maker: TypeAlias = Callable[[], tuple[nn.Module, Batch]]
"""Makes a model in training mode, and inputs of it; always the same. Its library must be installed."""

_BATCH, _TOKENS, _VOCABULARY, _PIXELS, _WIDE_PIXELS = 2, 64, 64, 32, 64
_NARROW = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
_TEXT = {**_NARROW, "vocab_size": _VOCABULARY, "max_position_embeddings": 128}
_MOE = {**_TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": _VOCABULARY}
_PICTURE = {**_NARROW, "image_size": _PIXELS, "patch_size": 4}
_TRANSFORMERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "LlamaConfig": ("CausalLM", _TEXT),
    "MistralConfig": ("CausalLM", _TEXT | {"num_key_value_heads": 2}),
    "Qwen2Config": ("CausalLM", _TEXT | {"num_key_value_heads": 4}),
    "Qwen3Config": ("CausalLM", _TEXT | {"head_dim": 8, "num_key_value_heads": 2}),
    "GemmaConfig": ("CausalLM", _TEXT | {"head_dim": 8, "num_key_value_heads": 1}),
    "Gemma2Config": ("CausalLM", _TEXT | {"head_dim": 8}),
    "PhiConfig": ("CausalLM", _TEXT),
    "Phi3Config": ("CausalLM", _TEXT | {"pad_token_id": 0}),
    "StableLmConfig": ("CausalLM", _TEXT | {"num_key_value_heads": 4}),
    "Olmo2Config": ("CausalLM", _TEXT | {"pad_token_id": 0}),
    "GPTNeoXConfig": ("CausalLM", _TEXT),
    "FalconConfig": ("CausalLM", _TEXT),
    "GPT2Config": ("CausalLM", _GPT),
    "GPTJConfig": ("CausalLM", _GPT | {"rotary_dim": 8}),
    "BloomConfig": ("CausalLM", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": _VOCABULARY}),
    "OPTConfig": ("CausalLM", _TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "MixtralConfig": ("CausalLM", _TEXT | {"num_local_experts": 4, "num_key_value_heads": 2}),
    "Qwen3MoeConfig": ("CausalLM", _MOE | {"num_experts": 4, "head_dim": 8}),
    "DeepseekV3Config": (
        "CausalLM",
        _MOE | _LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "BertConfig": ("MaskedLM", _TEXT),
    "RobertaConfig": ("MaskedLM", _TEXT),
    "ElectraConfig": ("MaskedLM", _TEXT | {"embedding_size": 32}),
    "DebertaV2Config": ("MaskedLM", _TEXT),
    "DistilBertConfig": ("MaskedLM", {"dim": 32, "n_heads": 4, "n_layers": 2, "vocab_size": _VOCABULARY}),
    "T5Config": (
        "Seq2SeqLM",
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": _VOCABULARY},
    ),
    "BartConfig": (
        "Seq2SeqLM",
        {
            "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
            "vocab_size": _VOCABULARY,
        },
    ),
    "ViTConfig": ("ImageClassification", _PICTURE),
    "DeiTConfig": ("ImageClassification", _PICTURE | {"architectures": ["DeiTForImageClassification"]}),
    "BeitConfig": ("ImageClassification", _PICTURE),
    "SwinConfig": (
        "ImageClassification",
        {"image_size": _PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
         "window_size": 4},
    ),
    "ConvNextConfig": (
        "ImageClassification", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 2},
    ),
    "ResNetConfig": (
        "ImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
    ),
    "SegformerConfig": (
        "SemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
         "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
         "decoder_hidden_size": 16},
    ),
}  # fmt: skip
"""Configuration classes of `transformers`: the head, and sizes."""

_VIT = {"img_size": _PIXELS, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
_TIMM: Mapping[str, Mapping[str, Any]] = {
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "stem_width": 16},
    "vit_tiny_patch16_224": _VIT,
    "deit_tiny_patch16_224": _VIT,
    "eva02_tiny_patch14_224": _VIT | {"ref_feat_shape": (8, 8)},
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (16, 16, 32, 32)},
    "swin_tiny_patch4_window7_224": {
        "img_size": _PIXELS, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "MlpMixer": {"img_size": _PIXELS, "patch_size": 4, "embed_dim": 32, "num_blocks": 2},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "regnety_002": {"w0": 8, "wa": 16.0, "depth": 6, "group_size": 8},
}  # fmt: skip
"""Names and classes of models of `timm`: options that make them small."""

_TORCHVISION: Mapping[str, Mapping[str, Any]] = {
    "ResNet": {"layers": [1, 1, 1, 1], "width_per_group": 64},
    "DenseNet": {"growth_rate": 8, "block_config": (2, 2), "num_init_features": 16},
    "VisionTransformer": {
        "image_size": _PIXELS, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 32,
        "mlp_dim": 64,
    },
    "SwinTransformer": {
        "patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4],
        "stochastic_depth_prob": 0.0,
    },
    "ConvNeXt": {"stochastic_depth_prob": 0.0},
    "mobilenet_v3_small": {"width_mult": 0.5},
    "segmentation.lraspp_mobilenet_v3_large": {},
}  # fmt: skip
"""Classes and functions of `torchvision.models`: options that make them small."""

_GROUPS = {"sample_size": _PIXELS, "block_out_channels": (16, 32), "norm_num_groups": 4}
_DIFFUSERS: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "UNet2DModel": (
        _GROUPS | {
            "layers_per_block": 1, "attention_head_dim": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        ("sample", "timestep"),
    ),
    "UNet2DConditionModel": (
        _GROUPS | {
            "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "attention_head_dim": 8,
            "cross_attention_dim": 32, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        ("sample", "timestep", "encoder_hidden_states"),
    ),
    "AutoencoderKL": (
        _GROUPS | {
            "layers_per_block": 1, "latent_channels": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        ("sample",),
    ),
}  # fmt: skip
"""Models of `diffusers`: sizes, and the inputs that they take."""


class Positional(nn.Module):
    """A model with its inputs by position, which returns tensors alone."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the first of the results."""
        outputs: Tensor = self.model(**dict(zip(self.names, inputs, strict=True)), return_dict=False)[0]
        return outputs


def makers() -> dict[str, Maker]:
    """Return the makers of all architectures by name: `timm/resnet18` is of the library `timm`."""
    of_transformers = {f"transformers/{name}": partial(_of_transformers, name) for name in _TRANSFORMERS}
    of_timm = {f"timm/{name}": partial(_of_timm, name) for name in _TIMM}
    of_torchvision = {f"torchvision/{name}": partial(_of_torchvision, name) for name in _TORCHVISION}
    of_diffusers = {f"diffusers/{name}": partial(_of_diffusers, name) for name in _DIFFUSERS}
    return {**of_transformers, **of_timm, **of_torchvision, **of_diffusers}


def missing_libraries() -> list[str]:
    """Return the libraries that are not installed."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def library_of(name: str) -> str:
    """Return the library of an architecture."""
    return name.partition("/")[0]


def _of_transformers(name: str) -> tuple[nn.Module, Batch]:
    transformers = _imported("transformers")
    head, sizes = _TRANSFORMERS[name]
    config = getattr(transformers, name)(**sizes)
    for key in ("dropout", "dropout_rate", "drop_path_rate", "classifier_dropout_prob"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = _tamed(getattr(transformers, f"AutoModelFor{head}").from_config(config))
    if head.startswith(("Image", "Semantic")):
        return Positional(model, ["pixel_values"]), _batch(_pictures(_PIXELS))
    tokens = torch.randint(1, _VOCABULARY, (_BATCH, _TOKENS))
    if head == "Seq2SeqLM":
        return Positional(model, ["input_ids", "decoder_input_ids"]), _batch(tokens, tokens.flip(1))
    return Positional(model, ["input_ids"]), _batch(tokens)


def _of_timm(name: str) -> tuple[nn.Module, Batch]:
    options = _TIMM[name]
    timm = _imported("timm")
    maker = partial(timm.create_model, name) if name.islower() else getattr(timm.models, name)
    model = maker(num_classes=8, **options)
    return _tamed(model), _batch(_pictures(options.get("img_size", _WIDE_PIXELS)))


def _of_torchvision(name: str) -> tuple[nn.Module, Batch]:
    models: Any = _imported("torchvision.models")
    options: dict[str, Any] = {**_TORCHVISION[name], "num_classes": 8}
    pixels = options.get("image_size", _WIDE_PIXELS)
    if name == "ResNet":
        options["block"] = importlib.import_module("torchvision.models.resnet").BasicBlock
    if name == "ConvNeXt":
        block = importlib.import_module("torchvision.models.convnext").CNBlockConfig
        options["block_setting"] = [block(16, 32, 1), block(32, None, 1)]
    maker = models
    for part in name.split("."):
        maker = getattr(maker, part)
    if name.islower() or "." in name:
        options["weights"] = None
    if name.startswith("segmentation"):
        options["weights_backbone"] = None
    return _tamed(maker(**options)), _batch(_pictures(pixels))


def _of_diffusers(name: str) -> tuple[nn.Module, Batch]:
    sizes, names = _DIFFUSERS[name]
    model = _tamed(getattr(_imported("diffusers"), name)(**sizes))
    given = {
        "sample": _pictures(_PIXELS),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(_BATCH, 16, 32),
    }
    return Positional(model.train(), names), _batch(*(given[each] for each in names))


def _imported(library: str) -> Any:
    """Return a library, with the random numbers of a model that is to be made."""
    module = importlib.import_module(library)
    torch.manual_seed(0)
    return module


def _tamed(model: nn.Module) -> nn.Module:
    """Return the model without dropout, and without weights of zero, behind which gradients are zero."""
    for module in model.modules():
        for name in ("p", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def _pictures(pixels: int) -> Tensor:
    return torch.randn(_BATCH, 3, pixels, pixels)


def _batch(*inputs: Tensor) -> Batch:
    return Batch(inputs=inputs, targets=())
