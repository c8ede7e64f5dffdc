"""The snapshots of tasks' files, on which the layers of many sandboxes lie: kept in the store while they are here.

They are pinned for the directory of the layers. One goes from the store with its layer, unless somebody was given
it as a snapshot and has not forgotten it: that one is then kept or collected like any other.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from midstream.envs.errors import SnapshotError, SnapshotMissing
from midstream.envs.protocol import Snapshot
from midstream.envs.store.store import SnapshotStore

_OWNER = "layers "
# Another process may delete the same snapshot between its recording and its pin.
_ATTEMPTS = 5


class Bases:
    """Any thread may call."""

    def __init__(self, store: SnapshotStore, directory: Path) -> None:
        """`directory` is that of the layers, beside which is the lock that tells whether their process lives."""
        self._store = store
        self._owner = f"{_OWNER}{directory}"
        self._lock = threading.Lock()
        self._of_layer: dict[str, Snapshot] = {}
        self._given: set[str] = set()

    def keep(self, layer: str, put: Callable[[], Snapshot]) -> Snapshot:
        """Has the snapshot that `put` records kept until its layer is dropped. Raises SnapshotError."""
        for _ in range(_ATTEMPTS):
            snapshot = put()
            with self._lock:
                try:
                    self._store.hold([snapshot], self._owner)
                except SnapshotMissing:
                    continue
                self._of_layer[layer] = snapshot
                return snapshot
        raise SnapshotError(
            f"{self._store.path}: the snapshot of a task was deleted {_ATTEMPTS} times; try again"
        )

    def give(self, snapshot: Snapshot) -> None:
        """Somebody may go on from the snapshot later; fine for those that are no base."""
        if snapshot.parent is None:
            with self._lock:
                self._given.add(snapshot.id)

    def forget(self, snapshots: Iterable[Snapshot]) -> set[str]:
        """Nobody will go on from these; returns the ids of those on which new sandboxes lie."""
        with self._lock:
            self._given.difference_update(snapshot.id for snapshot in snapshots)
            return {snapshot.id for snapshot in self._of_layer.values()}

    def drop(self, layers: Iterable[str]) -> None:
        """Gives up those whose layers are gone, unless other layers have the same. Raises SnapshotError."""
        with self._lock:
            gone = {
                snapshot.id for layer in layers if (snapshot := self._of_layer.pop(layer, None)) is not None
            }
            gone -= {snapshot.id for snapshot in self._of_layer.values()}
            if gone & self._given:
                self._store.unpin(gone & self._given, self._owner)
            if gone - self._given:
                self._store.delete(gone - self._given, self._owner)

    def unpin_abandoned(self) -> None:
        """Takes off the pins of layers whose process was killed and that are removed. Raises SnapshotError."""
        for owner, snapshots in self._store.pins().items():
            if (
                owner.startswith(_OWNER)
                and not Path(owner.removeprefix(_OWNER)).with_suffix(".lock").exists()
            ):
                self._store.unpin(snapshots, owner)

    def close(self) -> None:
        """Gives up all. Raises SnapshotError."""
        with self._lock:
            layers = list(self._of_layer)
        self.drop(layers)
