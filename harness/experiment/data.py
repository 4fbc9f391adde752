"""Training data: batches that depend on seed and step alone, so that every variant reads the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from harness.errors import ConfigError, require_one_of
from harness.models.base import Batch, LanguageModelSpec, ModelSpec
from harness.records.files import read_bytes

Content = TypeVar("Content")

_BYTE_VALUES = 256
_MOST_BYTES = 2**30  # of a text, which is read whole; larger ones are for `data=tokens`
_RAW_DTYPES = ("uint16", "uint32", "int32", "int64")
_SCANNED_TOKENS = 1 << 24  # of a token file when a trial is checked; what is read later is checked then


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A stream of batches. `draw`: `draw(count, random)` draws `count` samples, on CPU."""

    draw: Callable[[int, np.random.Generator], Batch]

    def batch(self, *, step: int, batch_size: int, seed: int, dp_rank: int = 0, dp_size: int = 1) -> Batch:
        """Return the share of rank `dp_rank` in the global batch of `step`, on CPU.

        Args:
            step: the training step, >= 0.
            batch_size: samples of the global batch, a multiple of `dp_size`.
            seed: the experiment's seed, >= 0.
            dp_rank: data parallel rank; its share is rows `[dp_rank, dp_rank + 1) * batch_size / dp_size`.
            dp_size: data parallel ranks.

        Raises:
            ConfigError: `dp_size` does not divide `batch_size`, or a token is outside the vocabulary.
        """
        if batch_size % dp_size:
            problem = f"must be a multiple of the {dp_size} data parallel ranks, got {batch_size}"
            raise ConfigError("batch_size", problem)
        share = batch_size // dp_size
        return self.draw(batch_size, np.random.default_rng((seed, step))).rows(dp_rank * share, share)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """The description of where tokens come from."""

    def files(self) -> tuple[Path, ...]:
        """Return the user's files that hold the tokens; when one changes, trials run anew."""
        return ()

    def source(self, *, vocab_size: int, sequence_length: int) -> Source:
        """Return the batches for a model of V = `vocab_size` tokens and sequences of S = `sequence_length`.

        Raises:
            ConfigError: the file cannot be read, is shorter than one sequence and its target, or holds a
                token outside the vocabulary.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic(DataSpec):
    """Uniformly random tokens of the model's vocabulary."""

    def source(self, *, vocab_size: int, sequence_length: int) -> Source:
        """Return the batches."""
        width = sequence_length + 1
        return _sequences(lambda count, random: random.integers(vocab_size, size=(count, width)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Text(DataSpec):
    """The bytes of a file as tokens. `path`: the file; null for the text that ships with the program."""

    path: str | None = None

    def files(self) -> tuple[Path, ...]:
        """Return the file, unless it ships with the program."""
        return () if self.path is None else (Path(self.path),)

    def source(self, *, vocab_size: int, sequence_length: int) -> Source:
        """Return windows of the bytes."""
        if vocab_size < _BYTE_VALUES:
            problem = f"bytes need model.vocab_size to be at least {_BYTE_VALUES}, got {vocab_size}"
            raise ConfigError("data.path", problem)
        tokens = np.frombuffer(self._bytes(), dtype=np.uint8)
        return _windows(tokens, vocab_size=vocab_size, sequence_length=sequence_length, name=self._name)

    @property
    def _name(self) -> str:
        return self.path or "the shipped text"

    def _bytes(self) -> bytes:
        if self.path is None:
            return (files("harness.experiment") / "texts" / "constitution.txt").read_bytes()
        return _read(self.path, lambda path: read_bytes(path, _MOST_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens(DataSpec):
    """A file of token numbers, mapped into memory and never read whole.

    Fields:
        path: a one-dimensional `.npy` array of integers, or a raw file of them.
        dtype: dtype of a raw file, in native byte order: uint16, uint32, int32 or int64; null for `.npy`.
    """

    path: str
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse a dtype where the file states its own, and none where it does not."""
        is_npy = Path(self.path).suffix == ".npy"
        if is_npy and self.dtype is not None:
            problem = "must be null for .npy, which states its own"
            raise ConfigError("data.dtype", f"{problem}, got {self.dtype!r}")
        if is_npy:
            return
        if self.dtype is None:
            problem = f"a raw file needs one of {', '.join(_RAW_DTYPES)}, got null for {self.path!r}"
            raise ConfigError("data.dtype", problem)
        require_one_of("data.dtype", self.dtype, _RAW_DTYPES)

    def files(self) -> tuple[Path, ...]:
        """Return the token file."""
        return (Path(self.path),)

    def source(self, *, vocab_size: int, sequence_length: int) -> Source:
        """Return windows of the file."""
        tokens = _read(self.path, self._map)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            problem = f"must hold one dimension of integers, got {tokens.dtype} of shape {tokens.shape}"
            raise ConfigError("data.path", f"{problem} in {self.path!r}")
        _require_tokens(tokens[:_SCANNED_TOKENS], vocab_size=vocab_size, name=self.path)
        return _windows(tokens, vocab_size=vocab_size, sequence_length=sequence_length, name=self.path)

    def _map(self, path: Path) -> NDArray[Any]:
        if self.dtype is None:
            mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return mapped
        return np.memmap(path, dtype=self.dtype, mode="r")


def data_specs() -> dict[str, type[DataSpec]]:
    """Return `{name: class}` of the kinds of data."""
    return {"synthetic": Synthetic, "text": Text, "tokens": Tokens}


def source_of(model: ModelSpec, data: DataSpec, *, sequence_length: int) -> Source:
    """Return the batches that `model` trains on: of `data`, or drawn by the model where it reads no tokens.

    Raises:
        ConfigError: as `DataSpec.source`.
    """
    if not (isinstance(model, LanguageModelSpec) and model.reads_tokens()):
        return Source(draw=model.sample_batch)
    tokens = data.source(vocab_size=model.vocab_size, sequence_length=sequence_length)
    return Source(draw=lambda count, random: model.arranged(tokens.draw(count, random), random))


def empty_source(model: ModelSpec, *, sequence_length: int) -> Source:
    """Return batches of the same shapes on the meta device: no data is read, and none takes memory."""
    if not (isinstance(model, LanguageModelSpec) and model.reads_tokens()):
        return Source(draw=model.empty_batch)

    def draw(count: int, random: np.random.Generator) -> Batch:
        tokens = torch.empty((1, sequence_length), dtype=torch.int64, device="meta")
        return model.arranged(Batch(inputs=(tokens,), targets=tokens), random).empty(count)

    return Source(draw=draw)


def _sequences(rows: Callable[[int, np.random.Generator], NDArray[np.int64]]) -> Source:
    """Return the batches of `rows(count, random)`, sequences of S + 1 tokens of shape (count, S + 1)."""

    def draw(count: int, random: np.random.Generator) -> Batch:
        tokens = torch.from_numpy(rows(count, random))
        return Batch(inputs=(tokens[:, :-1],), targets=tokens[:, 1:])

    return Source(draw=draw)


def _windows(tokens: NDArray[Any], *, vocab_size: int, sequence_length: int, name: str) -> Source:
    """Return windows of S + 1 tokens at random places."""
    starts = len(tokens) - sequence_length
    if starts < 1:
        problem = f"{name!r} holds {len(tokens)} tokens; sequence_length {sequence_length} needs one more"
        raise ConfigError("data.path", problem)

    def rows(count: int, random: np.random.Generator) -> NDArray[np.int64]:
        places = random.integers(starts, size=(count, 1)) + np.arange(sequence_length + 1)
        drawn: NDArray[np.int64] = tokens[places].astype(np.int64)
        _require_tokens(drawn, vocab_size=vocab_size, name=name)
        return drawn

    return _sequences(rows)


def _require_tokens(tokens: NDArray[Any], *, vocab_size: int, name: str) -> None:
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        problem = f"tokens must be in [0, {vocab_size}), by model.vocab_size, got {worst} in {name!r}"
        raise ConfigError("data.path", problem)


def _read(path: str, reader: Callable[[Path], Content]) -> Content:
    if Path(path).exists() and not Path(path).is_file():  # to open a pipe would wait for its writer
        raise ConfigError("data.path", f"cannot read {path!r}: it is no plain file")
    try:
        return reader(Path(path))
    except (OSError, ValueError) as error:  # ValueError: numpy finds no array, or a broken length
        raise ConfigError("data.path", f"cannot read {path!r}: {error}") from error
