"""Who made the state that an environment is in: from a chain of snapshots to the writer of every path.

Pure functions over the records of one rollout. The start of a chain is the task's own state, which no policy
made; what differs from it was written by some turn under some policy version.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from midstream.envs.protocol import Change, ChangeKind, Snapshot


class LineageError(ValueError):
    """The snapshots do not form one chain back to the task's start."""


@dataclass(frozen=True)
class Write:
    """The last write to one path that differs from the task's start.

    `kind` is relative to the start: a file that was deleted and made anew is modified. `bytes` is the size
    of what is there now, 0 where it has no content. `version` and `turn` are None where the snapshot does
    not say who led to it.
    """

    path: str
    kind: ChangeKind
    bytes: int
    version: int | None
    turn: int | None

    @property
    def weight(self) -> int:
        """What it counts in a share: its bytes, and 1 at least, so that a deletion or a link counts too."""
        return _weight(self.bytes)


class Weighted(Protocol):
    """What has a part in a state: a write, or a sum of several."""

    @property
    def version(self) -> int | None: ...

    @property
    def weight(self) -> int: ...


def chain(snapshots: Mapping[str, Snapshot], last: str) -> list[Snapshot]:
    """The snapshots from the task's start, to which no turn led, to `last`, by their parents.

    Raises LineageError where one of them is not in `snapshots`, or where parents lead in a circle.
    """
    found: dict[str, Snapshot] = {}
    wanted: str | None = last
    while wanted is not None:
        if wanted in found:
            raise LineageError(f"snapshot {wanted} is among its own ancestors")
        if wanted not in snapshots:
            raise LineageError(f"snapshot {wanted} is not recorded, so who made {last} is unknown")
        snapshot = found[wanted] = snapshots[wanted]
        wanted = None if snapshot.turn is None else snapshot.parent
    return list(reversed(found.values()))


def surviving_writes(snapshots: Sequence[Snapshot]) -> list[Write]:
    """The last write to each path that differs between the first and the last snapshot of a chain, by path.

    A path that was changed and changed back is not there: what it was is told by the digests of the changes.
    """
    first: dict[str, Change] = {}
    latest: dict[str, tuple[Change, Snapshot]] = {}
    for snapshot in snapshots[1:]:
        for change in snapshot.changes:
            first.setdefault(change.path, change)
            latest[change.path] = change, snapshot
    return [
        Write(path, _kind(first[path].before, change.after), change.bytes, snapshot.version, snapshot.turn)
        for path, (change, snapshot) in sorted(latest.items())
        if first[path].before != change.after
    ]


def shares(writes: Iterable[Weighted]) -> dict[int | None, float]:
    """The share of each policy version in what differs from the start, by weight; they sum to 1, or none."""
    weights: defaultdict[int | None, int] = defaultdict(int)
    for write in writes:
        weights[write.version] += write.weight
    total = sum(weights.values())
    return {version: weight / total for version, weight in weights.items()}


def shares_along(snapshots: Sequence[Snapshot]) -> list[dict[int | None, float]]:
    """`shares` of the surviving writes at every snapshot of a chain, in time linear in its changes."""
    first: dict[str, str] = {}
    latest: dict[str, tuple[int | None, int]] = {}
    weights: defaultdict[int | None, int] = defaultdict(int)
    found: list[dict[int | None, float]] = []
    for index, snapshot in enumerate(snapshots):
        for change in snapshot.changes if index else ():
            if change.path in latest:
                version, weight = latest.pop(change.path)
                weights[version] -= weight
            if first.setdefault(change.path, change.before) != change.after:
                latest[change.path] = snapshot.version, _weight(change.bytes)
                weights[snapshot.version] += _weight(change.bytes)
        total = sum(weights.values())
        found.append({version: weight / total for version, weight in weights.items() if weight})
    return found


def _weight(size_bytes: int) -> int:
    return max(size_bytes, 1)


def _kind(before: str, after: str) -> ChangeKind:
    if not before:
        return "created"
    return "modified" if after else "deleted"
