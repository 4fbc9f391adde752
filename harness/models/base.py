"""The contract of a model family: a frozen specification that builds a plain module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch

from harness.errors import ConfigError, require_at_least, require_fraction

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.models.parts.context_attention import Ring
    from harness.models.parts.expert_dispatch import Mixture

LossFunction: TypeAlias = "Callable[[Any, Batch], Tensor]"
"""A function from the outputs of a model and the batch to a scalar."""


def plan_of(**patterns: Sequence[str]) -> dict[str, str]:
    """Return a tensor parallel plan from patterns of FQNs by their style."""
    return {pattern: style for style, named in patterns.items() for pattern in named}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The data of one training step.

    Fields:
        inputs: positional inputs of the model; for language models `(tokens,)`, int64 of shape (B, S).
        targets: what the loss compares outputs with, a tensor or a tree of them; for language models the
            token that follows each input token, int64 of shape (B, S); `None` when the loss needs none.
        keywords: further inputs of the model, by name; empty for models that ship.
        is_joined: it is what `joined` made of several micro-batches, which `parts` gives back.
        positions: inputs, by number or name, that say where a part of a sequence lies: the same in each
            micro-batch.
    """

    inputs: tuple[Any, ...]
    targets: Any
    keywords: Mapping[str, Any] = field(default_factory=dict)
    is_joined: bool = False
    positions: frozenset[int | str] = frozenset()

    def to(self, device: torch.device) -> Batch:
        """Return a copy of the batch on `device`: what a step does to it reaches no other step."""
        inputs, targets, keywords = copy.deepcopy((self.inputs, self.targets, dict(self.keywords)))
        copied = dataclasses.replace(self, inputs=inputs, targets=targets, keywords=keywords)
        return copied.changed(lambda tensor: _like(tensor, tensor.detach().to(device)))

    def rows(self, first: int, count: int) -> Batch:
        """Return samples `[first, first + count)`: rows of every tensor, in memory of their own."""

        def cut(tensor: Tensor) -> Tensor:
            share = tensor.detach()[first : first + count]
            return _like(tensor, share.clone(memory_format=torch.contiguous_format))

        return self.changed(cut)

    def empty(self, rows: int) -> Batch:
        """Return a batch on the meta device with `rows` rows like the first one of every tensor."""

        def spread(tensor: Tensor) -> Tensor:
            return _like(tensor, torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta"))

        return self.changed(spread)

    def share(self, rank: int, ranks: int) -> Batch:
        """Return the rows of data-parallel rank `rank` of `ranks`, which divide the rows."""
        count = self.row_count() // ranks
        return self.rows(rank * count, count)

    def parts(self) -> tuple[Batch, ...]:
        """Return the micro-batches of a step, in their order; what is not joined is one."""
        if not self.is_joined:
            return (self,)
        return tuple(
            Batch(inputs=inputs, targets=targets, keywords=keywords, positions=self.positions)
            for inputs, keywords, targets in self.inputs
        )

    def row_count(self) -> int:
        """Return the rows of the first input that has any; 0 where none has."""
        leaves = torch.utils._pytree.tree_leaves((self.inputs, self.keywords))  # noqa: SLF001 (no public name)
        return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` of every tensor."""
        tree = self.inputs, self.targets, self.keywords
        inputs, targets, keywords = torch.utils._pytree.tree_map_only(torch.Tensor, change, tree)  # noqa: SLF001 (no public name)
        return dataclasses.replace(self, inputs=inputs, targets=targets, keywords=keywords)


def joined(batches: Iterable[Batch]) -> Batch:
    """Return what one step reads: `batches`, one after the other."""
    first, *_ = joining = tuple(batches)
    parts = ((each.inputs, dict(each.keywords), each.targets) for each in joining)
    return Batch(inputs=tuple(parts), targets=None, is_joined=True, positions=first.positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model, described; subclasses add its shape and build it.

    Fields:
        name: what the configuration calls the model.
        layers_fqn: FQN of the container that holds the blocks.
        dropout: probability of every dropout in the model, in [0, 1).

    Every other number among the fields of a model is a size.

    Attributes:
        repeats_one_block: whether the model calls `n_layers` equal blocks, the children of `layers_fqn`, one
            after another, and nothing else in it depends on their number. A step is then predicted from few.
        scales_with_batch: whether a step with more samples does the same with larger tensors, as far as no
            size in it becomes larger than another. Steps are then predicted from those of other batch sizes.
        has_outputs_of_parts: whether a rank that holds part of each sequence gives outputs of that part; else
            it gives those of the whole.

    Raises:
        ConfigError: a size is below 1, or the dropout outside [0, 1).
    """

    repeats_one_block: ClassVar[bool] = False
    scales_with_batch: ClassVar[bool] = False
    has_outputs_of_parts: ClassVar[bool] = True

    name: str
    layers_fqn: str
    dropout: float

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in values.items():
            if name != "dropout" and isinstance(value, int | float) and not isinstance(value, bool):
                require_at_least(f"model.{name}", value, 1)
        if self.dropout is not None:  # some families leave it to the user's code
            require_fraction("model.dropout", self.dropout)

    def build(self) -> nn.Module:
        """Return the module on the current default device, meta included, with its own initialisation."""
        raise NotImplementedError

    def make(self) -> tuple[nn.Module, LossFunction]:
        """Return a new module, as `build` does, and the loss that goes with this one."""
        return self.build(), self.loss

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the scalar loss, in float32, by a loss that knows no model but the one it was made with."""
        raise NotImplementedError

    def loss_reads_targets_only(self) -> bool:
        """Return whether the loss reads nothing but outputs and targets, so that a plan may include it."""
        return False

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return `batch_size` samples that the model draws itself, on CPU; rows of every tensor are samples.

        A language model draws none: it reads tokens.
        """
        raise NotImplementedError

    def empty_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return what `sample_batch` does on the meta device, from one sample: it takes no memory."""
        return self.sample_batch(1, random).empty(batch_size)

    def flops_per_sample(self, sequence_length: int) -> int | None:
        """Return the forward FLOPs of a sample in matmuls, convolutions and attention, or `None` if unknown.

        A multiplication and an addition are two FLOPs. Attention counts the whole S x S square,
        4·S·D FLOPs a token and layer, although a causal kernel may skip half of it; recomputed
        FLOPs are counted by the same rule, so ratios agree.

        Args:
            sequence_length: tokens a sample, where the model is one of language.
        """
        raise NotImplementedError

    def usual_dtype(self) -> str:
        """Return the `dtype` of an experiment whose configuration leaves it open."""
        return "fp32"

    def casts_buffers(self) -> bool:
        """Return whether `dtype` casts floating-point buffers as well as parameters."""
        return True

    def is_reduced(self) -> bool:
        """Return whether the model, as it is made, computes in half precision."""
        return False

    def runs_user_code(self) -> bool:
        """Say if making the model runs code of the user's, which may do anything and take any time."""
        return False

    def reads_tokens(self) -> bool:
        """Return whether the model trains on the tokens of `data`, and not on samples of its own."""
        return False

    def may_drop_out(self) -> bool:
        """Return whether the model has dropout, or nobody knows."""
        return self.dropout > 0

    def remarks(self, *, ep: int, tp: int) -> tuple[str, ...]:  # noqa: ARG002 (mixtures of transformers do)
        """Return sentences on what was decided about the model that its reader may not expect.

        Args:
            ep: ranks that share experts.
            tp: ranks that share linears.
        """
        return ()

    def replaced(self, ep: int) -> tuple[str, ...]:  # noqa: ARG002 (as above)
        """Return what stands in for what the user's own code decides, such as `use_cache: True -> False`.

        Args:
            ep: ranks that share experts.
        """
        return ()

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return `{FQN pattern: style}`; empty when there is no plan.

        Styles: `column` and `row` of linears; `summed` of modules between them that run on a shard, whose
        gradients ranks add up; `column_gathered` and `row_scattered` of linears that give and take wholes.
        """
        return {}

    def split_at(self) -> tuple[str, tuple[str, ...]]:
        """Return the option that says where stages are cut, and the FQNs of the containers it names."""
        return "mesh.pp", (self.layers_fqn,)

    def fixed_batch(self, seed: int = 0, device: str = "cpu") -> Batch | None:  # noqa: ARG002 (the default has none)
        """Return the one batch that the model brings itself, or `None` when batches are drawn.

        Args:
            seed: seed of the experiment; what is drawn for the batch is what `make` draws under it.
            device: default device while it is made.
        """
        return None

    def splits_fixed_batch(self) -> bool:
        """Say if data-parallel ranks share the rows of the one batch; else each computes all of it."""
        return False

    def files(self) -> tuple[Path, ...]:
        """Return the user's files that decide the model; a change of theirs makes other trials."""
        return ()

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return `{configuration path: size}` of what tensor parallelism divides evenly."""
        return {}

    def split_plan(self, *, sp: bool, loss_parallel: bool) -> dict[str, str]:
        """Return `tensor_parallel_plan` with the styles of `mesh.sp` and `mesh.loss_parallel`.

        Further styles: `sequence` of norms on parts of the sequence, `sequence_gathered` of one whose output
        is whole again; `gathered_input` of what reads the whole sequence, `scattered_input` of what reads
        parts of a whole; `row_to_sequence` and `embedding_to_sequence` of what gives parts of it, `scattered`
        of what gives wholes that are cut; `column_from_sequence`, `column_to_logits` and
        `column_from_sequence_to_logits` of heads.

        Raises:
            ConfigError: the model has no such plan.
        """
        for option, is_asked in (("sp", sp), ("loss_parallel", loss_parallel)):
            if is_asked:
                raise ConfigError(f"mesh.{option}", f"model {self.name!r} has no plan for it; use false")
        return self.tensor_parallel_plan()

    def check_split(self, *, sequence_length: int, tp: int, sp: bool, loss_parallel: bool) -> None:
        """Refuse `mesh.sp` and `mesh.loss_parallel` where the model, or a length, does not suit them.

        Raises:
            ConfigError: no plan, or a size that `tp` does not divide.
        """
        plan = self.split_plan(sp=sp, loss_parallel=loss_parallel)
        if sp:
            require_parts("sequence_length", sequence_length, "mesh.tp", tp, "mesh.sp=false")
        vocabulary = getattr(self, "vocab_size", tp)
        if (loss_parallel or "head" in plan) and vocabulary % tp:
            raise ConfigError("mesh.tp", f"must divide model.vocab_size, {vocabulary}, got {tp}")

    def check_stages(self, stages: int) -> None:
        """Refuse to be cut into so many stages, of which each has a block.

        Raises:
            ConfigError: the model cannot be cut, or has too few blocks.
        """
        if not all(self.split_at()[1]):
            problem = f"model {self.name!r} has no blocks between which stages could be cut"
            remedy = "use mesh.pp=1 without its options, or model=llama_nano, for example"
            raise ConfigError("mesh.pp", f"{problem}; {remedy}")
        blocks = getattr(self, "n_layers", stages)
        if blocks < stages:
            problem = f"makes {stages} stages of {blocks} blocks, which leaves a stage without any"
            raise ConfigError("mesh.pp", f"{problem}; use fewer ranks or stages, or more model.n_layers")

    def check_context(self, *, sequence_length: int, cp: int, cp_method: str, tp: int) -> None:  # noqa: ARG002 (the default refuses any)
        """Refuse parts of sequences on `cp` ranks where the model, or its length, does not suit them.

        Raises:
            ConfigError: no attention over parts, or a size that `cp` does not divide.
        """
        problem = f"model {self.name!r} has no attention over parts of a sequence, got {cp}"
        remedy = "use 1 without its options, or model=llama_nano, for example"
        raise ConfigError("mesh.cp", f"{problem}; {remedy}")

    def check_experts(self, ep: int) -> None:
        """Refuse to share experts among `ep` ranks where there are none, or not as many for each.

        Raises:
            ConfigError: naming the number.
        """
        problem = f"model {self.name!r} has no experts that ranks could share, got {ep}"
        raise ConfigError("mesh.ep", f"{problem}; use 1 without its options, or model=moe_nano, for example")

    def mixtures(self, model: nn.Module) -> Mapping[str, Mixture]:
        """Return the experts of a model of this family that ranks can share, by the FQNs of their routers."""
        raise NotImplementedError

    def check_dispatch(self, model: nn.Module) -> None:
        """Refuse experts that would compute otherwise where they are dispatched to; ours do not.

        Args:
            model: a model of this family, without memory.

        Raises:
            ConfigError: naming their class.
        """

    def sequence_part(self, batch: Batch, part: int, parts: int) -> Batch:
        """Return a batch with one part of each sequence, of as many, and with what says where it lies."""
        raise NotImplementedError

    def attend_over_parts(self, model: nn.Module, method: str, ring: Ring) -> None:
        """Let the attention of a model of this family go over the parts that the ranks of a ring hold."""
        raise NotImplementedError

    def check(self, *, sequence_length: int, tp: int) -> None:
        """Refuse what this model cannot do.

        Raises:
            ConfigError: too few positions, no tensor parallel plan, or a size that `tp` does not divide.
        """
        self._check_length(sequence_length)
        if tp == 1:
            return
        if not self.tensor_parallel_plan():
            is_open = hasattr(self, "tp_column")
            named = "name linears with model.tp_column and model.tp_row, or " if is_open else ""
            remedy = f"{named}use 1 without its options"
            problem = f"model {self.name!r} has no tensor parallel plan, got {tp}"
            raise ConfigError("mesh.tp", f"{problem}; {remedy}")
        for where, size in self.tensor_parallel_sizes().items():
            if size % tp:
                raise ConfigError("mesh.tp", f"must divide {where}, {size}, got {tp}")

    def _check_length(self, sequence_length: int) -> None:
        """Refuse a `sequence_length` that the model cannot take; what reads no sequences takes any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelSpec(ModelSpec):
    """A model of token sequences, which it reads from `data`.

    Fields:
        vocab_size: number of tokens V; inputs and targets are in [0, V).
    """

    vocab_size: int

    def reads_tokens(self) -> bool:
        """Return true."""
        return True

    def arranged(self, batch: Batch, random: np.random.Generator) -> Batch:  # noqa: ARG002 (few models draw more)
        """Return a batch of tokens as the model takes them.

        Args:
            batch: tokens and targets, both of shape (B, S).
            random: draws what the model reads besides tokens.
        """
        return batch

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of `outputs`, logits of shape (B, S, V), in float32."""
        assert batch.targets is not None, "a language model's batch has targets"
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten())

    def loss_reads_targets_only(self) -> bool:
        """Return true."""
        return True

    def flops_per_token(self, sequence_length: int) -> int | None:  # noqa: ARG002 (the default knows none)
        """Return the forward FLOPs of a token, counted as `flops_per_sample` says, or `None` if unknown."""
        return None

    def flops_per_sample(self, sequence_length: int) -> int | None:
        """Return those of S tokens."""
        token_flops = self.flops_per_token(sequence_length)
        return None if token_flops is None else sequence_length * token_flops

    def longest_sequence(self) -> int | None:
        """Return how many positions the model has, or `None` when it does not count them."""
        return None

    def _check_length(self, sequence_length: int) -> None:
        longest = self.longest_sequence()
        if longest is not None and sequence_length > longest:
            problem = f"must be at most {longest}, the positions of {self.name!r}, got {sequence_length}"
            raise ConfigError("sequence_length", problem)


def token_part(batch: Batch, part: int, parts: int) -> Batch:
    """Return a part of tokens and targets, both of shape (B, S), with the positions of its tokens, (S,)."""
    (tokens_BS,), targets_BS = batch.inputs, batch.targets
    length = tokens_BS.size(1) // parts
    own = slice(part * length, (part + 1) * length)
    positions_S = torch.arange(own.start, own.stop, device=tokens_BS.device)
    tokens, targets = (each[:, own].contiguous() for each in (tokens_BS, targets_BS))
    return Batch(inputs=(tokens, positions_S), targets=targets, positions=frozenset({1}))


def _like(original: Tensor, made: Tensor) -> Tensor:
    """Return `made` as a leaf that requires a gradient where `original` does."""
    return made.requires_grad_(original.requires_grad)


def require_parts(where: str, size: int, axis: str, ranks: int, remedy: str) -> None:
    """Refuse a `size` that the ranks of an axis cannot share evenly; name the sizes next to it."""
    if size % ranks:
        below, above = size // ranks * ranks, -(-size // ranks) * ranks
        nearest = f"{below} or {above}" if below else f"{above}"
        problem = f"must be a multiple of {axis}, {ranks}, got {size}"
        raise ConfigError(where, f"{problem}; use {nearest}, or {remedy}")


def require_even_heads(sizes: Mapping[str, int], *, cp: int, cp_method: str, tp: int) -> None:
    """Refuse heads, among the sizes that tensor parallelism divides, that `ulysses` cannot share evenly."""
    for where, size in sizes.items():
        if cp_method == "ulysses" and where.endswith("heads") and size % (cp * tp):
            problem = f"must divide {where}, {size}, with mesh.cp_method=ulysses"
            on = f" on each of {tp} ranks of mesh.tp" if tp > 1 else ""
            raise ConfigError("mesh.cp", f"{problem}{on}, got {cp}; use mesh.cp_method=gather or ring")


def require_divides(part: str, part_size: int, whole: str, whole_size: int) -> None:
    """Refuse a field `part` of the model that does not divide the field `whole`."""
    if whole_size % part_size:
        raise ConfigError(f"model.{part}", f"must divide model.{whole}, {whole_size}, got {part_size}")
