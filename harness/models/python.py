"""The user's own module, made by a function of theirs."""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import ConfigError
from harness.models.base import Batch, LanguageModelSpec, LossFunction, ModelSpec, plan_of
from harness.models.parts import containers, given_inputs, made_model, user_factory
from strategies import user_sources
from strategies.user_function import UserFunction

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from harness.models.parts.given_inputs import GivenInputs
    from harness.models.parts.user_factory import FactoryCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The facts that one model of a factory shows of all.

    Fields:
        is_reduced: whether a parameter has less precision than float32.
        files: the user's files behind the factory.
        modes: what `train()` changes of its modes, in words.
    """

    is_reduced: bool
    files: tuple[Path, ...]
    modes: tuple[str, ...]


_KNOWN: dict[str, Made] = {}
"""What other processes have told of calls of factories: a cache, as that of `_made` is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonSpec(LanguageModelSpec):
    """A module that a user's factory returns, in the dtypes and modes that the factory gives it.

    The factory returns the module, which then maps tokens (B, S) to logits (B, S, V); or
    `(module, inputs, loss_fn)`, where `inputs` is one of

    * a tuple of positional inputs or a mapping of inputs by name: the batch of every step, and
      `loss_fn(outputs)` a scalar on the device of `outputs`;
    * a function of the batch size, or a dataset with a length: each batch or item is `(inputs, targets)`,
      a row of every tensor a sample, and `loss_fn(outputs, targets)` a scalar.

    Fields:
        layers_fqn: FQN of the container of the blocks; empty when there is none.
        vocab_size: number of tokens V that the module takes; unused where the factory gives inputs.
        dropout: argument of a factory that takes `dropout`, refused for one that takes none; null: the
            factory's own.
        factory: `package.module:function`, importable, or below the current folder.
        tp_column: FQN patterns of linears that tensor parallelism splits by column.
        tp_row: FQN patterns of linears that tensor parallelism splits by row.
        tp_summed: FQN patterns of modules between them that run on a shard, such as a norm of heads: their
            parameters stay whole, and ranks add up their gradients.
        kwargs: further arguments of the factory, by name; null for none.
        split_example: share the rows of one example out to data-parallel ranks; else each computes all.
        cast_buffers: let `dtype` cast floating-point buffers too.
        pp_split: FQNs of the containers between whose blocks stages of a pipeline are cut, in the order in
            which forward calls them; what runs before the first block and after the last one is in the first
            and the last stage.
    """

    dropout: float | None = None  # type: ignore[assignment]  # open here, where the user's code decides
    factory: str
    tp_column: tuple[str, ...]
    tp_row: tuple[str, ...]
    kwargs: dict[str, Any] | None = field(default=None, hash=False)
    split_example: bool = False
    cast_buffers: bool = False
    tp_summed: tuple[str, ...] = ()
    pp_split: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        UserFunction(name=self.factory, group="model", refused=ConfigError).check_name()

    def build(self) -> nn.Module:
        """Return the factory's module.

        Raises:
            ConfigError: the factory cannot be imported or called, it returns something else, or
                `layers_fqn` names no container of blocks.
        """
        model, _ = self.make()
        return model

    def make(self) -> tuple[nn.Module, LossFunction]:
        """Return the factory's module, and the loss of the same call: it may close over the module.

        Raises:
            ConfigError: as `build`.
        """
        model, given = self._call().make()
        containers.require_container(model, self.layers_fqn)
        made_model.train(model)
        return model, partial(LanguageModelSpec.loss, self) if given is None else given.loss

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of the factory's `loss_fn`, or the mean cross entropy if there is none."""
        given = self._given()
        return LanguageModelSpec.loss(self, outputs, batch) if given is None else given.loss(outputs, batch)

    def loss_reads_targets_only(self) -> bool:
        """Return whether the loss is not the factory's own."""
        return self.reads_tokens()

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return samples of the factory's batch function or dataset, on CPU."""
        return self._drawn(batch_size, int(random.integers(given_inputs.SEEDS)))

    def empty_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return samples on the meta device, or on CPU where the factory's batch function needs values."""
        given, seed = self._given(device="meta"), int(random.integers(given_inputs.SEEDS))
        assert given is not None, "a model of tokens draws nothing"
        try:
            return given.batch(batch_size, seed, device="meta")
        except ConfigError:
            return self._drawn(batch_size, seed)

    def usual_dtype(self) -> str:
        """Return `own`: the model stays as the factory made it."""
        return "own"

    def casts_buffers(self) -> bool:
        """Return `cast_buffers`."""
        return self.cast_buffers

    def is_reduced(self) -> bool:
        """Return whether a parameter of the factory's module has less precision than float32."""
        return self.made().is_reduced

    def runs_user_code(self) -> bool:
        """Return true."""
        return True

    def may_drop_out(self) -> bool:
        """Return true: a factory may drop out whatever it likes."""
        return True

    def replaced(self, ep: int) -> tuple[str, ...]:  # noqa: ARG002 (of mixtures of transformers)
        """Return the factory's own dropout where `dropout` replaces it, and modes that `train()` changes."""
        return (*self._call().replaced(), *self.made().modes)

    def reads_tokens(self) -> bool:
        """Return whether the factory gives no inputs."""
        return self._given(device="meta") is None

    def files(self) -> tuple[Path, ...]:
        """Return the user's source files that make the model."""
        return self.made().files

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the modules that the options name."""
        return plan_of(column=self.tp_column, row=self.tp_row, summed=self.tp_summed)

    def split_at(self) -> tuple[str, tuple[str, ...]]:
        """Return `pp_split`."""
        return "model.pp_split", self.pp_split

    def check_stages(self, stages: int) -> None:
        """Refuse not to be told where to cut."""
        if not self.pp_split:
            problem = f"must name the containers of blocks between which {stages} stages are cut"
            remedy = f"use model.pp_split=[{self.layers_fqn or 'layers'}]"
            raise ConfigError("model.pp_split", f"{problem}; {remedy}, or mesh.pp=1 without its options")

    def fixed_batch(self, seed: int = 0, device: str = "cpu") -> Batch | None:
        """Return the factory's example, the same in every process; `None` where it gives none.

        Args:
            seed: seed of the experiment: the loss of a module that was made under it belongs to this example.
            device: default device while it is made.

        Raises:
            ConfigError: its rows are to be shared out, and it has no rows, or its loss reads all of them.
        """
        given = self._given(seed, device)
        example = None if given is None else given.example
        if not self.split_example:
            return example
        if given is None or example is None:
            problem = "has no effect: the factory gives no example inputs; leave it at false"
            raise ConfigError("model.split_example", problem)
        count = example.row_count()
        given_inputs.require_rows(example, count, "model.split_example", "the example")
        given_inputs.require_open_loss(given.loss_fn, count, "model.split_example")
        return example

    def splits_fixed_batch(self) -> bool:
        """Return `split_example`."""
        return self.split_example

    def _drawn(self, batch_size: int, seed: int) -> Batch:
        """Return samples on CPU, of what the factory gives without memory where that has them."""
        light = self._given(device="meta")
        assert light is not None, "a model of tokens draws nothing"
        with suppress(ConfigError):  # its samples are tensors of the factory's, which have no values here
            batch = light.batch(batch_size, seed)
            if not any(tensor.is_meta for _, tensor in given_inputs.tensors_of(batch)):
                return batch
        given = self._given()
        assert given is not None, "a factory gives the same each time"
        return given.batch(batch_size, seed)

    def made(self) -> Made:
        """Return what one model of the factory shows of all, as another process or this one has seen it."""
        known = _KNOWN.get(self._key())
        return _made(self._call()) if known is None else known

    def know(self, made: Made) -> None:
        """Take what another process has seen: the factory need not run here; a pickled spec says it on."""
        _KNOWN[self._key()] = made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, and what is known of the models of the factory."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _unpickled, (values, _KNOWN.get(self._key()))

    def _key(self) -> str:
        return json.dumps([self.factory, self.dropout, self.kwargs])

    def _call(self) -> FactoryCall:
        return user_factory.FactoryCall.of(self.factory, self.dropout, self.kwargs or {})

    def _given(self, seed: int = 0, device: str = "cpu") -> GivenInputs | None:
        return user_factory.inputs_of(self._call(), seed, device)


def _unpickled(values: dict[str, Any], made: Made | None) -> PythonSpec:
    spec = PythonSpec(**values)
    if made is not None:
        spec.know(made)
    return spec


@functools.cache
def _made(call: FactoryCall) -> Made:
    """Return what a model without memory shows. The factory runs first: it may import modules as it runs."""
    with given_inputs.seeded(0), torch.device("meta"):
        model, _ = call.make()
    classes = {type(module).__module__ for module in model.modules()}
    return Made(
        is_reduced=made_model.is_reduced(model),
        files=user_sources.user_files([*call.user().modules(), *classes]),
        modes=made_model.train(model),
    )
