"""The set of parameters that get a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.measure.parity.snapshot import Snapshot


class TrainedSet:
    """The parameters that got a gradient in any step that was watched.

    Attributes:
        names: their names, in order of registration.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def watching(self, snapshots: Iterable[Snapshot]) -> Iterator[Snapshot]:
        """Yield `snapshots`, having noted which gradients each has."""
        for snapshot in snapshots:
            self.names |= {name: None for name, leaf in snapshot.gradients.items() if leaf is not None}
            yield snapshot
            del snapshot  # the consumer decides how long it lives

    def beyond(self, other: TrainedSet) -> tuple[str, ...]:
        """Return the names that `other` lacks."""
        return tuple(name for name in self.names if name not in other.names)
