"""The labels of one model, and the options of its regions."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from torch import nn

from strategies.generators import LatestStates
from strategies.nested.labels import Labels
from strategies.nested.nested_regions import Path
from strategies.regions.host_copies import HostLedger
from strategies.regions.offload_kinds import OffloadKind
from strategies.regions.outside_tensors import OutsideTensors
from strategies.regions.rewind import Rewind, RewoundCall

Regions: TypeAlias = tuple[Path, ...]
"""The recomputed regions around a call, outermost first, by their paths."""


class Rewinds(weakref.WeakKeyDictionary[nn.Module, Rewind]):
    """Facts that were learned of the state of modules; a copy has learned nothing."""

    def call(self, module: nn.Module) -> RewoundCall:
        """Return one call of `module`, which notes the state that it finds."""
        found = self.get(module)
        if found is None:
            found = self[module] = Rewind(generators=self._generators)
        return found.call(module)

    @cached_property
    def _generators(self) -> LatestStates:
        return LatestStates()

    def __reduce__(self) -> tuple[type[Rewinds], tuple[()]]:
        return Rewinds, ()

    def __deepcopy__(self, memo: object) -> Rewinds:
        return Rewinds()


@dataclass(frozen=True, kw_only=True, slots=True)
class Nest:
    """The labels and options of one model.

    Fields:
        kept: regions that are not recomputed.
        offload: what of a region waits in host memory, by the region's path.
        rewinds: what was learned of the state of modules.
        outside: finds what calls of modules read from outside of them.
    """

    labels: Labels
    kept: frozenset[Path] = frozenset()
    preserve_rng_state: bool = True
    early_stop: bool = True
    rewind: bool = True
    split_backward: str = "hold"
    offload: Mapping[Path, OffloadKind] = field(default_factory=dict)
    ledger: HostLedger = field(default_factory=HostLedger)
    rewinds: Rewinds = field(default_factory=Rewinds)
    outside: OutsideTensors = field(init=False, compare=False)
    _recomputed: dict[Path, Regions] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outside", OutsideTensors(is_rewound=self.rewind))

    def recomputed(self, path: Path) -> Regions:
        """Return the recomputed regions around a call at `path`."""
        found = self._recomputed.get(path)
        if found is None:
            prefixes = (path[:end] for end in range(1, len(path) + 1))
            found = self._recomputed[path] = tuple(each for each in prefixes if each not in self.kept)
        return found
