"""Which parked sandboxes stay alive for their rollouts to go on.

A sandbox is parked under the id of the snapshot that was taken of it last. Nothing is lost with one that is
spilled: the store has the snapshot. Those parked longest ago go first, since the order in which rollouts are
resumed is mostly that in which they were cut off, and what was overtaken is the likeliest to be dropped.
"""

import itertools
from dataclasses import dataclass

from midstream.envs.pool.ending import Live
from midstream.envs.protocol import Snapshot


@dataclass(frozen=True)
class Parked:
    """A live sandbox in the state of `snapshot`."""

    live: Live
    snapshot: Snapshot


class HotSandboxes:
    """The parked ones, within a number and a number of bytes; decides, and destroys nothing itself."""

    def __init__(self, most: int, most_bytes: int | None) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._numbers = itertools.count()
        self._parked: dict[int, Parked] = {}

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def bytes(self) -> int:
        """What their workspaces hold, by their snapshots."""
        return sum(parked.snapshot.bytes for parked in self._parked.values())

    def admits(self, snapshot: Snapshot) -> bool:
        """Whether a sandbox in this state fits the budget at all."""
        return self._most > 0 and (self._most_bytes is None or snapshot.bytes <= self._most_bytes)

    def add(self, parked: Parked) -> list[Parked]:
        """Keeps it; returns those that must go for it, which may be itself."""
        self._parked[next(self._numbers)] = parked
        spilled = []
        while self._parked and self._is_beyond():
            spilled.append(self._remove(next(iter(self._parked))))
        return spilled

    def take(self, snapshot: Snapshot) -> Parked | None:
        """One that was parked under this snapshot."""
        for number, parked in self._parked.items():
            if parked.snapshot.id == snapshot.id:
                return self._remove(number)
        return None

    def oldest(self) -> Parked | None:
        """The one to spill where its slot is needed."""
        return self._remove(next(iter(self._parked))) if self._parked else None

    def _is_beyond(self) -> bool:
        return len(self._parked) > self._most or (
            self._most_bytes is not None and self.bytes > self._most_bytes
        )

    def _remove(self, number: int) -> Parked:
        return self._parked.pop(number)
