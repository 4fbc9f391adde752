"""`acbench.fit`: what to switch on for a model of the calling program."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from acbench.html import html_table
from harness.command_line.fit_words import hardware_named, in_words_of_program
from harness.errors import ConfigError, require_one_of
from harness.experiment.data import Synthetic
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.experiment.protocol import Protocol
from harness.fit.answer import Answer, answer
from harness.fit.in_process import handed_over
from harness.fit.progress import progress_shown
from harness.fit.screen import HEAD, screen, table_of
from harness.fit.subject import MARGIN, Subject
from strategies import chunk_variants, generators, shard_variants
from strategies.ac.full import Full
from strategies.regions.block_search import search_blocks

_MOST_PARAMETERS = 30_000_000
"""Of a model that is trained as a proof in the caller's own process."""


class Fit(Answer):
    """The option to switch on; a notebook shows the table, and a terminal the screen of `acbench-fit`.

    Attributes of use: `use` (the option, or `None` where nothing fits), `options`, `blocks`, `unknown`,
    `remedies`; `code()` is the file of the answer, `apply(model)` puts it on a model.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return screen(self)

    def _repr_html_(self) -> str:
        """Return the options as a table, the answer in bold."""
        rows, used = table_of(self)
        return html_table(
            HEAD[1:], [row[1:] for row in rows], title=screen(self).splitlines()[0], marked=used
        )


def fit(
    make: Callable[[], nn.Module],
    batch: Any,
    on: str | None = None,
    loss_fn: Callable[[Any], Any] | None = None,
    *,
    layers_fqn: str = "",
    module_classes: Sequence[str] = (),
    gib: float | None = None,
    dtype: str = "own",
    margin: float = MARGIN,
    proof: bool = True,
) -> Fit:
    """Return what to switch on so that a training step of a model fits a device.

    Every option is traced on tensors without data; nothing of the model is built with memory but for the
    proof, one small step of the answer. Bytes are those of a measured step on the CPU, step times are
    predicted. The source is `harness.fit`, the command is `acbench-fit`, the rule is in docs/fit.md.

    Args:
        make: returns a fresh plain model, in float32 unless `dtype` says otherwise.
        batch: a tuple of positional inputs, a dict of keyword inputs, or one tensor; where all tensors have
            the same B in their shapes (B, ...), other batches are tried too.
        on: a name of `conf/hardware`, such as `rtx4090`; without it, and without `gib`, the device at hand.
        loss_fn: takes what the model returns and gives a scalar; by default the `loss` field of the output,
            else the sum of means of its floating-point tensors.
        layers_fqn: container of the blocks, as strategies take it; by default blocks are found.
        module_classes: class names of the blocks, as strategies take them; they win over `layers_fqn`. They
            name a block that is no child of a container, and that forward calls several times.
        gib: GiB that a step may take.
        dtype: `own` (as the model is made), `fp32`, `bf16`, or `bf16_mixed`, which is autocast.
        margin: share of the usable bytes that stays free.
        proof: train one step of the answer next to the plain model.

    Returns:
        The answer: `use`, `options` (bytes, FLOPs, seconds of each), `code()`, `apply(model)`.

    Raises:
        ConfigError: a `ValueError`; an argument is wrong, the model has no blocks, or a step depends on data.
        StrategyError: a `ValueError`; a strategy does not suit the model.
    """
    require_one_of("dtype", dtype, ("own", "fp32", "bf16", "bf16_mixed"))
    if not 0 <= margin < 1:
        raise ConfigError("margin", f"must be in [0, 1), got {margin}")
    hardware = hardware_named(on, gib)
    named = Full(layers_fqn=layers_fqn, module_classes=cast("Any", module_classes))
    is_found = not (layers_fqn or module_classes)
    with in_words_of_program(), handed_over(make, batch, loss_fn) as (spec, rows), progress_shown() as tell:
        with generators.restored(), torch.device("meta"):
            found = search_blocks(spec.build()) if is_found else None
        if found is not None:
            named = Full(layers_fqn=found.layers_fqn, module_classes=found.module_classes)
        experiment = Experiment(
            model=dataclasses.replace(spec, layers_fqn=named.layers_fqn),
            mesh=Mesh(),
            ac=named,
            chunk=chunk_variants["none"](),
            shard=shard_variants["none"](),
            data=Synthetic(),
            protocol=Protocol(),
            dtype=dtype,
            batch_size=rows or 1,
        )
        subject = Subject(
            label=spec.name,
            experiment=experiment,
            hardware=hardware,
            is_found=is_found,
            margin=margin,
            has_batch=rows is not None,
            most_parameters=_MOST_PARAMETERS,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what training says of the model is no part of the answer
            whole = answer(subject, is_proven=proof, tell=tell)
    return Fit(**{each.name: getattr(whole, each.name) for each in dataclasses.fields(whole)})
