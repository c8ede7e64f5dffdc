"""The trees of snapshots: put together from a full manifest and the deltas since, and remembered while in use."""

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from weakref import WeakValueDictionary

from midstream.envs.errors import SnapshotDamaged, SnapshotMissing
from midstream.envs.store import manifests
from midstream.envs.store.index import Index, Row, now_s
from midstream.envs.store.manifests import Manifest
from midstream.envs.store.records import Entry, Tree, Updates

# A full manifest is written where the deltas since the last one take more than it, or than this.
MIN_CHAIN_BYTES = 16 << 10
MAX_DEPTH = 256
SALT_BYTES = 16
# Trees that nobody else holds any longer and may still be asked for.
_RECENT = 4


class Trees:
    """Reads trees from the index. Threads may share it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: WeakValueDictionary[str, Tree] = WeakValueDictionary()
        self._recent: OrderedDict[str, Tree] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, snapshot_id: str, tree: Tree) -> None:
        with self._lock:
            self._known[snapshot_id] = tree
            self._recent[snapshot_id] = tree
            self._recent.move_to_end(snapshot_id)
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)

    def load(self, snapshot_id: str) -> Tree:
        """Raises SnapshotMissing where it is not there or only needed for others, SnapshotDamaged."""
        row = self._index.row(snapshot_id)
        if row is None or row.pruned:
            raise SnapshotMissing(f"no snapshot {snapshot_id} in the store {self._index.path.parent}")
        deltas: list[Manifest] = []
        while (tree := self._find(row.id)) is None:
            manifest = read(row)
            deltas.append(manifest)
            if manifest.full:
                break
            below = None if manifest.parent is None else self._index.row(manifest.parent)
            if below is None:
                raise SnapshotDamaged(
                    f"snapshot {snapshot_id} is damaged: {manifest.parent}, its base, is missing"
                )
            row = below
        result = tree
        if deltas:
            entries = {} if tree is None else tree.entries.copy()
            for manifest in reversed(deltas):
                apply(entries, manifest.updates)
            result = Tree(entries, deltas[0].sum, deltas[0].bytes)
        assert result is not None
        self.remember(snapshot_id, result)
        return result

    def _find(self, snapshot_id: str) -> Tree | None:
        with self._lock:
            return self._known.get(snapshot_id)

    def state(self, snapshot_id: str) -> dict[str, str]:
        """The strings beside the tree. Raises SnapshotMissing, SnapshotDamaged."""
        row = self._index.row(snapshot_id)
        if row is None or row.pruned:
            raise SnapshotMissing(f"no snapshot {snapshot_id} in the store {self._index.path.parent}")
        return read(row).state


def apply(entries: dict[bytes, Entry], updates: Updates) -> None:
    for path, entry in updates.items():
        if entry is None:
            entries.pop(path, None)
        else:
            entries[path] = entry


def read(row: Row) -> Manifest:
    """The manifest of a row, checked. Raises SnapshotDamaged."""
    try:
        encoded = manifests.decompress(row.manifest)
        if manifests.checksum(encoded) != row.checksum:
            raise SnapshotDamaged("its records do not match their checksum")
        return manifests.decode(encoded)
    except SnapshotDamaged as fault:
        raise SnapshotDamaged(f"snapshot {row.id} is damaged: {fault}") from fault


def new_row(
    parent_id: str | None, base: Row | None, tree: Tree, updates: Updates, state: Mapping[str, str]
) -> Row:
    """The row of a new snapshot: relative to `base`, its parent's row, where that is there and short enough.

    A successor's name is its own, even where another workspace did the very same: who gives one up, or finds
    its sandbox again, must not mean the other.
    """
    delta = Manifest(parent_id, parent_id is None, tree.sum, tree.content_bytes, dict(state), updates)
    encoded = manifests.encode(delta)
    # The name is that of the delta, however the snapshot is stored.
    snapshot_id = manifests.snapshot_id(encoded, b"" if parent_id is None else os.urandom(SALT_BYTES))
    stored = manifests.compress(encoded)
    if base is not None and base.depth < MAX_DEPTH:
        chain_bytes = base.chain_bytes + len(stored)
        if chain_bytes <= max(base.full_bytes, MIN_CHAIN_BYTES):
            return _row(snapshot_id, delta, encoded, stored, (base.depth + 1, chain_bytes, base.full_bytes))
    return full_row(snapshot_id, parent_id, tree, state)


def full_row(snapshot_id: str, parent_id: str | None, tree: Tree, state: Mapping[str, str]) -> Row:
    """The row of a snapshot that needs no other."""
    manifest = Manifest(parent_id, True, tree.sum, tree.content_bytes, dict(state), tree.entries)
    encoded = manifests.encode(manifest)
    stored = manifests.compress(encoded)
    return _row(snapshot_id, manifest, encoded, stored, (0, 0, len(stored)))


def _row(
    snapshot_id: str, manifest: Manifest, encoded: bytes, stored: bytes, chain: tuple[int, int, int]
) -> Row:
    return Row(
        snapshot_id,
        manifest.parent,
        manifest.full,
        Tree({}, manifest.sum).digest,
        stored,
        manifests.checksum(encoded),
        manifest.bytes,
        *chain,
        now_s(),
        False,
    )
