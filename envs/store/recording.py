"""How a state becomes a snapshot: what differs from its parent, new blobs into a pack, all of it at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from midstream.envs.errors import SnapshotError, SnapshotMissing
from midstream.envs.protocol import Snapshot
from midstream.envs.store.chunks import CHUNK_BYTES
from midstream.envs.store.contents import Contents, Incoming
from midstream.envs.store.durable import mark_synced, sync_contents
from midstream.envs.store.index import (
    EpochMoved,
    Fsync,
    Index,
    Row,
    insert_blobs,
    insert_pack,
    insert_pins,
    insert_snapshot,
    read_epoch,
    read_row,
)
from midstream.envs.store.listing import distrusted
from midstream.envs.store.looking import Seen
from midstream.envs.store.records import EMPTY, Tree, Updates, changes, difference, text
from midstream.envs.store.records import parent as directory_of
from midstream.envs.store.statcache import StatCache
from midstream.envs.store.trees import Trees, full_row, new_row

# Collectors that delete blobs while a snapshot is taken make it start anew, this often at most.
ATTEMPTS = 20


@dataclass
class Baseline(StatCache):
    """What one workspace remembers between its snapshots: stats of its files, and its last snapshot.

    `epoch` is that of the store in which all contents of the tree were known to be there.
    """

    snapshot_id: str | None = None
    epoch: int | None = None
    state: Mapping[str, str] = field(default_factory=dict)

    def remember(self, seen: StatCache, snapshot_id: str, epoch: int, state: Mapping[str, str]) -> None:
        self.tree, self.listings, self.linked = seen.tree, seen.listings, seen.linked
        self.snapshot_id, self.epoch, self.state = snapshot_id, epoch, dict(state)


# Looks at the state now, given the parent's tree and where new blobs are kept.
Look = Callable[[Tree, Incoming], Seen]


class Recorder:
    """Writes snapshots into one store. Threads may share it."""

    def __init__(self, store: Path, index: Index, trees: Trees, fsync: Fsync) -> None:
        self._store = store
        self._index = index
        self._trees = trees
        self._fsync = fsync

    def record(
        self,
        look: Look,
        parent: Snapshot | None,
        baseline: Baseline,
        state: Mapping[str, str],
        *,
        pin: str | None,
        rereads: bool,
    ) -> Snapshot:
        """The snapshot of what `look` sees; the parent itself where nothing differs from it.

        `rereads` says that `look` reads again what the baseline no longer vouches for.
        """
        for _ in range(ATTEMPTS):
            epoch = self._index.epoch()
            before, state_before = self._before(parent, baseline)
            self._check_contents(baseline, epoch, rereads=rereads)
            with Incoming(self._store, self._index) as incoming:
                seen = look(before, incoming)
                tree = seen.cache.tree
                updates = (
                    seen.updates if seen.updates is not None else difference(before.entries, tree.entries)
                )
                if parent is not None and not updates and state == state_before and self._has(parent.id, pin):
                    baseline.remember(seen.cache, parent.id, epoch, state)
                    return parent
                row = self._row(parent, tree, updates, state)
                try:
                    self._commit(incoming, row, tree, epoch, pin)
                except EpochMoved:
                    continue
            self._trees.remember(row.id, tree)
            baseline.remember(seen.cache, row.id, epoch, state)
            changed = changes(before.entries, updates)
            return Snapshot(
                row.id, tree.digest, None if parent is None else parent.id, changed, tree.content_bytes
            )
        raise self._never_still()

    def adopt(
        self, read: Callable[[Incoming], tuple[Snapshot, Tree, dict[str, str]]], pin: str | None
    ) -> Snapshot:
        """The snapshot that `read` finds elsewhere, with all its blobs, under its own name."""
        for _ in range(ATTEMPTS):
            epoch = self._index.epoch()
            with Incoming(self._store, self._index) as incoming:
                snapshot, tree, state = read(incoming)
                try:
                    self._commit(
                        incoming, full_row(snapshot.id, snapshot.parent, tree, state), tree, epoch, pin
                    )
                except EpochMoved:
                    continue
            self._trees.remember(snapshot.id, tree)
            return snapshot
        raise self._never_still()

    def _never_still(self) -> SnapshotError:
        return SnapshotError(
            f"{self._store}: contents were collected in each of {ATTEMPTS} attempts; try again"
        )

    def sync(self, tree: Tree) -> list[int]:
        """Makes the tree's contents outlast a power cut; returns the packs to be marked as synced."""
        return [] if self._fsync == "never" else sync_contents(self._store, self._index, tree)

    def _has(self, snapshot_id: str, pin: str | None) -> bool:
        if pin is None:
            return self._index.restorable(snapshot_id)
        packs = self.sync(self._trees.load(snapshot_id)) if self._index.restorable(snapshot_id) else []
        with self._index.writing(durable=True) as connection:
            row = read_row(connection, snapshot_id)
            if row is None or row.pruned:
                return False
            mark_synced(connection, packs)
            insert_pins(connection, [snapshot_id], pin)
        return True

    def _before(self, parent: Snapshot | None, baseline: Baseline) -> tuple[Tree, Mapping[str, str]]:
        if parent is None:
            return EMPTY, {}
        if parent.id == baseline.snapshot_id:
            return baseline.tree, baseline.state
        return self._trees.load(parent.id), self._trees.state(parent.id)

    def _check_contents(self, baseline: Baseline, epoch: int, *, rereads: bool) -> None:
        """Blobs that the baseline vouches for may have been collected: then their files are read again."""
        if baseline.epoch in (None, epoch):
            return
        for path in self._lost(baseline.tree):
            if not rereads:
                raise SnapshotMissing(
                    f"the content of {text(path)!r} was collected from {self._store}: pin the parent of a layer"
                )
            directory = directory_of(path)
            if directory in baseline.listings:
                baseline.listings[directory] = distrusted(baseline.listings[directory])
        baseline.epoch = epoch

    def _lost(self, tree: Tree) -> list[bytes]:
        files = {path: entry for path, entry in tree.entries.items() if entry.kind == "f" and entry.size}
        contents = Contents(self._store, self._index)
        existing = contents.existing({entry.content for entry in files.values()})
        lost = [path for path, entry in files.items() if entry.content not in existing]
        for path, entry in files.items():
            if entry.size > CHUNK_BYTES and entry.content in existing:
                chunks = set(contents.chunk_hashes(entry.content))
                if contents.existing(chunks) != chunks:
                    lost.append(path)
        return lost

    def _row(self, parent: Snapshot | None, tree: Tree, updates: Updates, state: Mapping[str, str]) -> Row:
        if parent is None:
            return new_row(None, None, tree, updates, state)
        return new_row(parent.id, self._index.row(parent.id), tree, updates, state)

    def _commit(self, incoming: Incoming, row: Row, tree: Tree, epoch: int, pin: str | None) -> None:
        """Makes the snapshot and its blobs seen. Raises EpochMoved, SnapshotError."""
        durable = self._fsync == "always" or (self._fsync == "pinned" and pin is not None)
        incoming.finish(sync=durable)
        packs = self.sync(tree) if durable else []
        with self._index.writing(durable=durable) as connection:
            if read_epoch(connection) != epoch:
                raise EpochMoved
            if not row.full and read_row(connection, str(row.parent)) is None:
                raise EpochMoved
            if (pack := incoming.pack) is not None:
                rows = insert_pack(connection, pack.name, pack.bytes, pack.blocks, synced=pack.synced)
                insert_blobs(connection, rows)
            insert_snapshot(connection, row)
            mark_synced(connection, packs)
            if pin is not None:
                insert_pins(connection, [row.id], pin)
        incoming.kept = True
