from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils import _pytree as pytree  # torch.utils has no public name for it

from harness.errors import ConfigError
from harness.experiment.data import DataSpec, Synthetic, Text, Tokens, data_specs, empty_source, source_of
from harness.models import Batch
from harness.models.parts.given_inputs import tensors_of
from tests.harness.composing import experiment_of
from tests.parity.cases import OF_SAMPLES

CONF = Path(__file__).parents[3] / "conf" / "data"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "some text.txt"
    path.write_bytes(bytes(range(200)))
    return path


@pytest.fixture(params=["synthetic", "text", "own text", "tokens"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, text_file: Path) -> DataSpec:
    np.save(tmp_path / "tokens.npy", np.arange(200, dtype=np.uint16))
    return {
        "synthetic": Synthetic(),
        "text": Text(),
        "own text": Text(path=str(text_file)),
        "tokens": Tokens(path=str(tmp_path / "tokens.npy")),
    }[request.param]


def draw(spec: DataSpec, **changes: int) -> Batch:
    arguments = {"step": 0, "batch_size": 4, "seed": 0} | changes
    return spec.source(vocab_size=256, sequence_length=16).batch(**arguments)


def tokens_of(batch: Batch) -> torch.Tensor:
    assert batch.targets is not None
    return torch.cat((batch.inputs[0], batch.targets[:, -1:]), dim=1)


def test_the_configuration_has_every_kind_and_its_fields() -> None:
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == sorted(data_specs())
    for name, cls in data_specs().items():
        config = OmegaConf.load(CONF / f"{name}.yaml")
        assert isinstance(config, DictConfig)
        assert config.pop("name") == name
        assert set(config) == {field.name for field in dataclasses.fields(cls)}
        assert set(OmegaConf.merge(OmegaConf.structured(cls), config)) == set(config)


def test_targets_follow_inputs(spec: DataSpec) -> None:
    batch = draw(spec)
    (inputs,) = batch.inputs
    assert batch.targets is not None
    assert (inputs.shape, batch.targets.shape) == ((4, 16), (4, 16))
    assert (inputs.dtype, batch.targets.dtype, inputs.device.type) == (torch.int64, torch.int64, "cpu")
    assert torch.equal(inputs[:, 1:], batch.targets[:, :-1])


def test_seed_and_step_determine_the_batch(spec: DataSpec) -> None:
    first = tokens_of(draw(spec))
    assert torch.equal(first, tokens_of(draw(spec)))
    assert not torch.equal(first, tokens_of(draw(spec, step=1)))
    assert not torch.equal(first, tokens_of(draw(spec, seed=1)))
    assert not torch.equal(tokens_of(draw(spec, step=1)), tokens_of(draw(spec, seed=1)))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_ranks_shares_are_the_global_batch(spec: DataSpec, dp_size: int) -> None:
    shares = [tokens_of(draw(spec, dp_rank=rank, dp_size=dp_size)) for rank in range(dp_size)]
    assert torch.equal(torch.cat(shares), tokens_of(draw(spec)))


def test_windows_are_contiguous_bytes(text_file: Path) -> None:
    tokens = tokens_of(draw(Text(path=str(text_file)), batch_size=64))
    assert torch.equal(tokens - tokens[:, :1], torch.arange(17).expand(64, 17))


def test_windows_reach_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(range(18)))
    tokens = tokens_of(draw(Text(path=str(path)), batch_size=64))
    assert set(tokens[:, 0].tolist()) == {0, 1}


def test_a_file_of_one_window_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "shortest.txt"
    path.write_bytes(bytes(range(17)))
    assert torch.equal(tokens_of(draw(Text(path=str(path)))), torch.arange(17).expand(4, 17))


@pytest.mark.parametrize("model", ["vit", "evoformer", "unet"])
def test_shares_of_drawn_samples_are_the_global_batch(model: str) -> None:
    source = source_of(OF_SAMPLES[model], Text(), sequence_length=16)
    whole, *shares = (
        pytree.tree_leaves((each.inputs, each.targets))
        for each in (
            source.batch(step=1, batch_size=4, seed=0),
            *(source.batch(step=1, batch_size=4, seed=0, dp_rank=rank, dp_size=2) for rank in range(2)),
        )
    )
    joined = [torch.cat(pair) for pair in zip(*shares, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(joined, whole, strict=True))


def test_empty_batches_have_the_shapes_of_others() -> None:
    models = {
        **OF_SAMPLES,
        "tokens": experiment_of("model=mlp").model,
        "speech": experiment_of(
            "model=hf model.config_class=WhisperConfig model.layers_fqn=model.decoder.layers "
            "model.overrides={num_mel_bins:4,max_source_positions:8}"
        ).model,
        "a dataset": experiment_of("model=python model.factory=tests.harness.unusual_models:dataset").model,
        "a function": experiment_of(
            "model=python model.factory=tests.harness.unusual_models:batch_function"
        ).model,
    }
    for name, model in models.items():
        made = [
            source.batch(step=1, batch_size=4, seed=0, dp_rank=1, dp_size=2)
            for source in (
                source_of(model, Synthetic(), sequence_length=16),
                empty_source(model, sequence_length=16),
            )
        ]
        leaves = [[tensor for _, tensor in tensors_of(batch)] for batch in made]
        shown = [[(each.shape, each.stride(), each.dtype) for each in tensors] for tensors in leaves]
        assert shown[0] == shown[1], name
        assert {each.device.type for each in leaves[1]} == {"meta"}, name


@pytest.mark.parametrize("model", ["mlp", "vit_nano"])
def test_an_empty_batch_of_any_size_takes_nothing(model: str) -> None:
    source = empty_source(experiment_of(f"model={model}").model, sequence_length=2**20)
    batch = source.batch(step=0, batch_size=2**31 - 2, seed=0, dp_size=2)
    assert batch.row_count() == 2**30 - 1


def test_the_shipped_text_is_english_in_ascii() -> None:
    tokens = tokens_of(Text().source(vocab_size=256, sequence_length=512).batch(step=0, batch_size=8, seed=0))
    rows = [bytes(row.tolist()).decode("ascii") for row in tokens]
    assert all(" the " in row for row in rows)


def test_synthetic_tokens_fill_the_vocabulary() -> None:
    source = Synthetic().source(vocab_size=7, sequence_length=100)
    assert set(tokens_of(source.batch(step=0, batch_size=10, seed=0)).unique().tolist()) == set(range(7))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_raw_tokens_of_every_type(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(100, 117, dtype=dtype).tofile(path)
    assert torch.equal(
        tokens_of(draw(Tokens(path=str(path), dtype=dtype))), torch.arange(100, 117).expand(4, 17)
    )


def test_a_token_beyond_the_scanned_ones_is_found_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.experiment.data._SCANNED_TOKENS", 10)
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(246, 263))
    with pytest.raises(ConfigError) as refusal:
        draw(Tokens(path=str(path)))
    assert (
        str(refusal.value)
        == f"data.path: tokens must be in [0, 256), by model.vocab_size, got 262 in '{path}'"
    )


def save(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param(
            "short.txt",
            bytes(16),
            "'{path}' holds 16 tokens; sequence_length 16 needs one more",
            id="text shorter than a window",
        ),
        pytest.param(
            "empty.txt", b"", "'{path}' holds 0 tokens; sequence_length 16 needs one more", id="an empty text"
        ),
        pytest.param(
            "short.npy",
            np.zeros(16, dtype=np.int64),
            "'{path}' holds 16 tokens; sequence_length 16 needs one more",
            id="tokens shorter than a window",
        ),
        pytest.param(
            "large.npy",
            np.full(17, 256),
            "tokens must be in [0, 256), by model.vocab_size, got 256 in '{path}'",
            id="a token too large",
        ),
        pytest.param(
            "negative.npy",
            np.full(17, -1),
            "tokens must be in [0, 256), by model.vocab_size, got -1 in '{path}'",
            id="a negative token",
        ),
        pytest.param(
            "float.npy",
            np.zeros(17),
            "must hold one dimension of integers, got float64 of shape (17,) in '{path}'",
            id="numbers that are no integers",
        ),
        pytest.param(
            "square.npy",
            np.zeros((2, 17), dtype=np.int64),
            "must hold one dimension of integers, got int64 of shape (2, 17) in '{path}'",
            id="two dimensions",
        ),
        pytest.param(
            "cut.bin",
            bytes(35),
            "cannot read '{path}': Size of available data is not a multiple of the data-type size.",
            id="half a token",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = save(tmp_path, name, content)
    dtype = "uint16" if name.endswith(".bin") else None
    spec = Text(path=str(path)) if name.endswith(".txt") else Tokens(path=str(path), dtype=dtype)
    with pytest.raises(ConfigError) as refusal:
        spec.source(vocab_size=256, sequence_length=16)
    assert str(refusal.value) == f"data.path: {message.format(path=path)}"


@pytest.mark.parametrize(
    "spec",
    [Text(path="absent"), Tokens(path="absent", dtype="uint16"), Tokens(path="absent.npy")],
    ids=["text", "raw tokens", "array of tokens"],
)
def test_a_missing_file(spec: Text | Tokens) -> None:
    with pytest.raises(ConfigError) as refusal:
        spec.source(vocab_size=256, sequence_length=16)
    reason = f"[Errno 2] No such file or directory: '{spec.path}'"
    assert str(refusal.value) == f"data.path: cannot read '{spec.path}': {reason}"


def test_a_file_that_is_no_array(tmp_path: Path) -> None:
    path = save(tmp_path, "text.npy", b"no array")
    with pytest.raises(ConfigError) as refusal:
        Tokens(path=str(path)).source(vocab_size=256, sequence_length=16)
    assert str(refusal.value).startswith(f"data.path: cannot read '{path}': ")


def test_bytes_need_their_vocabulary() -> None:
    with pytest.raises(ConfigError) as refusal:
        Text().source(vocab_size=255, sequence_length=16)
    assert str(refusal.value) == "data.path: bytes need model.vocab_size to be at least 256, got 255"


@pytest.mark.parametrize(
    ("path", "dtype", "message"),
    [
        ("t.npy", "uint16", "data.dtype: must be null for .npy, which states its own, got 'uint16'"),
        ("t.bin", "float32", "data.dtype: must be one of uint16, uint32, int32, int64, got 'float32'"),
        (
            "t.bin",
            None,
            "data.dtype: a raw file needs one of uint16, uint32, int32, int64, got null for 't.bin'",
        ),
    ],
)
def test_types_that_are_refused(path: str, dtype: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Tokens(path=path, dtype=dtype)
    assert str(refusal.value) == message


def test_ranks_that_do_not_divide_the_batch() -> None:
    with pytest.raises(ConfigError) as refusal:
        draw(Synthetic(), batch_size=3, dp_size=2)
    assert str(refusal.value) == "batch_size: must be a multiple of the 2 data parallel ranks, got 3"
