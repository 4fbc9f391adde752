"""`ac=nested`: recompute regions that lie inside one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from strategies.base import (
    Observation,
    Strategy,
    StrategyError,
    check_simple_fields,
    refuse_named_inputs,
)
from strategies.nested import labels as labelling
from strategies.nested import nest_options, nested_forward, tape_listing
from strategies.nested.nested_regions import Path, even_paths, parse_path, path_name
from strategies.regions import blocks, region
from strategies.regions.offload_kinds import OFFLOAD_KINDS, OffloadKind
from strategies.regions.split_backward_modes import require_split_backward
from strategies.text_files import read_text

if TYPE_CHECKING:
    from torch import nn

    from strategies.nested.labels import Labels
    from strategies.nested.nest_options import Nest


@dataclass(frozen=True, kw_only=True, slots=True)
class Nested(Strategy):
    """Checkpoint regions of submodule calls, which may lie inside one another.

    Use when: block inputs that `full` saves are too much, in deep models. Each level adds a forward.

    Saved: the inputs of the outermost regions, and what is between them. Of L equal blocks in r levels of
        L^(1/r) regions each, L^(1/r) block inputs after forward, and in backward as many of each level.
    Recomputed: every call once for each region around it, so r times the forward; with `early_stop` less:
        a recomputation ends at the last tensor that is needed.
    Moved: what `offload` names.

    The default is Chen's: the square root of L regions (rounded down), and in each its blocks as regions.

    Fields:
        layers_fqn: container of the blocks that `levels` splits; not needed with labels.
        levels: `[a, b, c]`: the blocks in a regions, each of b, each of c; `[1]` is one region of all.
        labels: `{FQN: path}` of submodules: `[0, 1]` is the region 1 inside the region 0, a number is a path
            of one, `null` pads. A region's calls stand side by side.
        labels_file: YAML file of labels; it is read at once, and its content becomes `labels`.
        offload: `{kind: paths}`: part of these regions' saved tensors that waits in host memory. `all`: what
            autograd saves; `inputs`: the region's inputs; `internals`: all except the inputs.
        keep: paths of regions that are offloaded and not recomputed.
        preserve_rng_state: recompute with the random numbers of forward; without it, dropout makes
            gradients wrong and nothing says so.
        early_stop: end a recomputation when the last needed tensor is there.
        rewind: recompute with the state that forward found: buffers and attributes of modules, Python's and
            NumPy's random numbers, context variables; afterwards all is as it was before.
        split_backward: where a pipeline's schedule runs the backward of inputs and that of parameters apart:
            `hold` what the second needs of recomputations, or recompute `again` for it.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.1 and algorithm 2 (recursion); ColossalAI's
        nested activation checkpoint code generation for the labels.
    """

    reads_parameters: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ("regions",)

    layers_fqn: str = ""
    levels: Any = None  # a list of numbers
    labels: Any = None  # a mapping
    labels_file: str | None = None
    offload: Any = None  # a mapping
    keep: Any = ()  # a list of paths
    preserve_rng_state: bool = True
    early_stop: bool = True
    rewind: bool = True
    split_backward: str = "hold"

    def __post_init__(self) -> None:
        """Read the file of labels, and turn labels, levels, offload and keep into paths, or refuse them."""
        check_simple_fields("ac", self)
        given = [name for name in ("labels", "levels", "labels_file") if getattr(self, name) is not None]
        if len(given) > 1:
            raise StrategyError(f"ac.{given[1]}", f"must be null where ac.{given[0]} is given")
        if self.labels_file is not None:
            object.__setattr__(self, "labels", _read(self.labels_file))
            object.__setattr__(self, "labels_file", None)
        for name, parse in (
            ("levels", _parse_levels),
            ("labels", _parse_labels),
            ("offload", _parse_offload),
            ("keep", partial(_parse_paths, where="ac.keep")),
        ):
            object.__setattr__(self, name, parse(getattr(self, name)))
        self._check_offload()
        require_split_backward(self.split_backward, ("hold", "again"))

    def _check_offload(self) -> None:
        """Refuse kept regions that are not offloaded, and offloaded internals that nobody saves."""
        kinds = _kinds(self.offload or {})
        for path in self.keep:
            if path not in kinds:
                problem = f"region {path_name(path)} would be neither recomputed nor offloaded"
                raise StrategyError("ac.keep", f"{problem}; name it in ac.offload too")
        for path, kind in kinds.items():
            if kind == "internals" and path not in self.keep:
                problem = (
                    f"region {path_name(path)} is recomputed, its internals are not saved and cannot move"
                )
                raise StrategyError(
                    "ac.offload.internals", f"{problem}; name it in ac.keep too, or use inputs"
                )

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (nothing runs here)
        """Return `model`, with a region around its forward that writes the tapes of the others.

        Nothing runs here: what forward leaves in globals and caches is its own, made from real tensors. The
        labels are compared with the model's calls when it is first called, which then refuses them.

        Raises:
            StrategyError: the labels cannot fit the model, or the model is checkpointed already.
        """
        settings, plain = self._settings(model)
        region.enclose(plain, nested_forward.NestedForward(settings), holds_call=False)
        return model

    def check_compilation(self, order: str, scope: str) -> None:  # noqa: ARG002 (regions hold blocks in either)
        """Refuse compiled code that holds regions, whose tapes follow calls of modules.

        Raises:
            StrategyError: the model is compiled as one, or labels name modules inside blocks.
        """
        if scope == "model":
            problem = "model leaves no calls of modules for ac=nested to follow"
            raise StrategyError("compile_scope", f"{problem}; use blocks")
        depth = self.layers_fqn.count(".") + 1
        inner = [fqn for fqn in self.labels or {} if fqn.count(".") > depth]
        if inner:
            problem = f"{inner[0]!r} lies inside a compiled block, whose calls no tape follows"
            raise StrategyError("ac.labels", f"{problem}; label blocks, or use compile=none")

    def check_units(self, model: nn.Module, units: Collection[str]) -> None:
        """Refuse a region that begins inside a unit and ends outside of it.

        Raises:
            StrategyError: naming the unit.
        """
        labels_of_model = self._labels(blocks.unwrapped(model))
        for fqn in units:
            if labels_of_model.crosses(fqn):
                problem = f"a region begins inside {fqn!r}, an FSDP unit, and ends outside of it"
                raise StrategyError("ac.labels", f"{problem}, or the other way round; end it with {fqn!r}")

    def view(
        self,
        name: str,
        model: nn.Module,
        sample: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the tree of regions, and the tape of a step as code."""
        refuse_named_inputs(f"show={name}", keywords)
        settings, plain = self._settings(model)
        return tape_listing.follow(settings, plain, sample).text()

    def observe(self, model: nn.Module) -> Observation:
        """Return the bytes that the latest step moved, and the regions."""
        found = region.regions(blocks.unwrapped(model)).get("")
        return Observation() if found is None else found.observe()

    def _settings(self, model: nn.Module) -> tuple[Nest, nn.Module]:
        """Return what is to be done, and the plain model; refuse what cannot fit."""
        region.refuse_enclosed(model)
        plain = blocks.unwrapped(model)
        found = self._labels(plain)
        found.check(plain)
        kinds = _kinds(self.offload or {})
        found.check_regions("ac.keep", self.keep)
        found.check_regions("ac.offload", kinds)
        region.refuse_own_forward({blocks.plain_class(plain).__name__: plain})
        settings = nest_options.Nest(
            labels=found,
            kept=frozenset(self.keep),
            preserve_rng_state=self.preserve_rng_state,
            early_stop=self.early_stop,
            rewind=self.rewind,
            split_backward=self.split_backward,
            offload=kinds,
        )
        return settings, plain

    def _labels(self, model: nn.Module) -> Labels:
        if self.labels is not None:
            paths = {fqn: parse_path(label, f"ac.labels.{fqn}") for fqn, label in self.labels.items()}
            return labelling.Labels(paths=paths, where="ac.labels", is_partial=False)
        names = blocks.names_of_children(model, self.layers_fqn)
        if self.levels is None:
            split = _root_paths(len(names))
        else:
            split = even_paths(len(names), self.levels, "ac.levels")
        return labelling.Labels(
            paths=dict(zip(names, split, strict=True)), where="ac.levels", is_partial=True
        )


def _root_paths(count: int) -> tuple[Path, ...]:
    """Return the paths of `count` blocks in their square root of regions, each block a region in these."""
    outer = even_paths(count, (isqrt(count),), "ac.levels")
    sizes = Counter(outer)
    numbers: Counter[Path] = Counter()
    paths: list[Path] = []
    for path in outer:
        paths.append((*path, numbers[path]) if sizes[path] > 1 else path)
        numbers[path] += 1
    return tuple(paths)


def _parse_levels(levels: Any) -> tuple[int, ...] | None:
    if levels is None:
        return None
    is_list = isinstance(levels, Sequence) and not isinstance(levels, str)
    if not is_list or not levels or not all(type(parts) is int and parts >= 1 for parts in levels):
        problem = "must be a list of numbers of regions, each at least 1"
        raise StrategyError("ac.levels", f"{problem}, got {levels!r}")
    return tuple(levels)


def _parse_labels(labels: Any) -> dict[str, list[int]] | None:
    if labels is None:
        return None
    if not isinstance(labels, Mapping) or not labels:
        raise StrategyError("ac.labels", f"must be a mapping from submodules to paths, got {labels!r}")
    wrong = next((fqn for fqn in labels if type(fqn) not in {str, int}), None)
    if wrong is not None:  # 2.10 would arrive as 2.1
        problem = f"must name submodules in words, got {wrong!r}; quote such names in a file, ac.labels_file"
        raise StrategyError("ac.labels", problem)
    return {str(fqn): list(parse_path(label, f"ac.labels.{fqn}")) for fqn, label in labels.items()}


def _parse_offload(offload: Any) -> dict[OffloadKind, tuple[Path, ...]] | None:
    """Return the regions by kind of offloading, or refuse them."""
    if offload is None:
        return None
    if not isinstance(offload, Mapping) or not set(offload) <= set(OFFLOAD_KINDS):
        problem = f"must be a mapping from {', '.join(OFFLOAD_KINDS)} to lists of paths"
        raise StrategyError("ac.offload", f"{problem}, got {offload!r}")
    return {kind: _parse_paths(paths, f"ac.offload.{kind}") for kind, paths in offload.items()}


def _parse_paths(paths: Any, where: str) -> tuple[Path, ...]:
    if not isinstance(paths, Sequence) or isinstance(paths, str):
        raise StrategyError(where, f"must be a list of paths, got {paths!r}")
    return tuple(parse_path(path, where) for path in paths)


def _kinds(offload: Mapping[OffloadKind, Sequence[Path]]) -> dict[Path, OffloadKind]:
    """Return the kind of offloading by region; a region has one at most."""
    kinds: dict[Path, OffloadKind] = {}
    for kind, paths in offload.items():
        for path in paths:
            if path in kinds:
                problem = f"region {path_name(path)} is in {kinds[path]} already"
                raise StrategyError(f"ac.offload.{kind}", f"{problem}; name it once")
            kinds[path] = kind
    return kinds


def _read(file: str) -> Any:
    try:
        labels = yaml.safe_load(read_text(FilePath(file)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise StrategyError("ac.labels_file", f"cannot be read: {reason}") from error
    if labels is None:
        raise StrategyError("ac.labels_file", "is empty; it must hold a mapping from submodules to paths")
    return labels
