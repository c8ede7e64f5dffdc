"""Snapshots of directory trees: content-addressed, compressed, whole or absent, on a local file system.

    index.sqlite    which snapshots there are and where each blob lies
    packs/          the blobs, many to a file
    tmp/            packs being written

A snapshot costs what changed since its parent: only files whose stat differs are read, their new blobs go into
one pack, and one transaction of the index makes both seen. Threads and processes of one host may use a store at
once, a collector among them.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from midstream.envs.errors import SnapshotError, SnapshotMissing
from midstream.envs.protocol import Change, Snapshot
from midstream.envs.store.bundle import read_bundle, write_bundle
from midstream.envs.store.collect import Collected, Named, collect, ids
from midstream.envs.store.contents import Contents, Incoming
from midstream.envs.store.durable import drop_what_a_power_cut_took, mark_synced
from midstream.envs.store.index import Fsync, Index, insert_pins, read_row
from midstream.envs.store.layer import write_layer
from midstream.envs.store.looking import Seen, look_afresh, look_at_layer, look_at_tree, rewind
from midstream.envs.store.place import Owner
from midstream.envs.store.recording import Baseline as Baseline
from midstream.envs.store.recording import Recorder
from midstream.envs.store.records import EMPTY, Tree, changes, difference
from midstream.envs.store.restore import make_empty, removed_on_failure, write_tree
from midstream.envs.store.scan import UNLIMITED, TreeLimits, hash_only
from midstream.envs.store.statcache import Inode
from midstream.envs.store.trees import Trees
from midstream.envs.store.verify import Damage, verify


@dataclass(frozen=True)
class Statistics:
    """What a store holds: restorable `snapshots`, `pinned` ones, `blobs`, `packs`; `bytes` on disk."""

    snapshots: int
    pinned: int
    blobs: int
    packs: int
    bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class _KnownAlready(Exception):
    """What is looked at is a snapshot already."""


class SnapshotStore:
    """All snapshots under one directory."""

    def __init__(self, path: Path | str, limits: TreeLimits | None = None, fsync: Fsync = "pinned") -> None:
        """Opens or creates it. Raises SnapshotError.

        `fsync` says what outlasts a power cut once it is acknowledged: snapshots that are pinned, all, or none.
        A crash of the process takes nothing either way.
        """
        self.path = Path(path).absolute()
        self._limits = limits or TreeLimits()
        try:
            for name in ("packs", "tmp"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"cannot create the snapshot store {self.path}: {error.strerror}") from error
        self._index = Index(self.path / "index.sqlite", fsync)
        self._trees = Trees(self._index)
        self._recorder = Recorder(self.path, self._index, self._trees, fsync)
        drop_what_a_power_cut_took(self.path, self._index)

    def put(
        self,
        tree_dir: Path | str,
        parent: Snapshot | None = None,
        *,
        baseline: Baseline | None = None,
        state: Mapping[str, str] | None = None,
        mapped: frozenset[Inode] = frozenset(),
        pin: str | None = None,
    ) -> Snapshot:
        """Records the tree and `state`, a few strings beside it; returns `parent` itself if both are its own.

        A `baseline`, one for each directory, makes later snapshots cheap. `mapped` are files, by device and
        inode, that a live process maps shared and writable: they are read whatever their stat says. `pin` is an
        owner for whom the snapshot is pinned as it comes. Raises WorkspaceLimit for what may not be in a tree
        and SnapshotError for what cannot be read or written; then nothing is left behind.
        """
        baseline = Baseline() if baseline is None else baseline

        def look(before: Tree, incoming: Incoming) -> Seen:
            return look_at_tree(tree_dir, baseline, before, incoming.ingest, self._limits, mapped)

        return self._recorder.record(look, parent, baseline, dict(state or {}), pin=pin, rereads=True)

    def put_layer(
        self,
        upper_dir: Path | str,
        parent: Snapshot,
        *,
        baseline: Baseline | None = None,
        state: Mapping[str, str] | None = None,
        known: Snapshot | None = None,
    ) -> Snapshot:
        """Records the parent's tree under this upper directory of an overlay, in time for the upper alone.

        Files that were copied up and are equal are no change. `known` is a snapshot of the same `state` that is
        returned, with nothing recorded, where the tree is the very same as its own. Raises what `put` does, and
        SnapshotMissing where the parent was collected.
        """
        baseline = Baseline() if baseline is None else baseline

        def look(before: Tree, incoming: Incoming) -> Seen:
            seen = look_at_layer(upper_dir, before, incoming.ingest, self._limits, self._contents())
            # Where it is the parent, the recorder sees that nothing differs.
            if known is not None and known.id != parent.id and self._is(known, seen.cache.tree):
                raise _KnownAlready
            return seen

        try:
            return self._recorder.record(look, parent, baseline, dict(state or {}), pin=None, rereads=False)
        except _KnownAlready:
            assert known is not None
            return known

    def digest_of_layer(self, layer_dir: Path | str, base: Snapshot) -> str:
        """The digest of the base's tree under this layer, from a fresh scan. Raises what `put_layer` does."""
        before = self._trees.load(base.id)
        return look_at_layer(layer_dir, before, hash_only, UNLIMITED, self._contents()).cache.tree.digest

    def write_delta(
        self, base: Snapshot, target: Snapshot, into: Path | str, owner: Owner | None = None
    ) -> None:
        """Writes into a missing or empty directory the overlay's layer that turns `base` into `target`.

        Deleted paths are whiteouts. Raises what `restore` does; the directory is then gone.
        """
        into = Path(into)
        before, after = self._trees.load(base.id), self._trees.load(target.id)
        make_empty(into)
        with removed_on_failure(into):
            write_layer(before, after, into, self._contents(), owner)

    def restore(
        self,
        snapshot: Snapshot,
        into: Path | str,
        *,
        baseline: Baseline | None = None,
        owner: Owner | None = None,
    ) -> str:
        """Writes the snapshot into a missing or empty directory and returns the digest of what is there.

        The digest is of a fresh scan. `owner` are the user and group to whom root gives what it makes. Raises
        SnapshotMissing where the store lacks it, SnapshotDamaged, naming file and content, where it is not as
        it was put, SnapshotError where it cannot be written; the directory is then gone.
        """
        into = Path(into)
        epoch, tree = self._index.epoch(), self._trees.load(snapshot.id)
        make_empty(into)
        with removed_on_failure(into):
            write_tree(tree.entries, into, self._contents(), owner)
            found = look_afresh(into, tree)
        if baseline is not None:
            baseline.remember(found, snapshot.id, epoch, self.state(snapshot))
        return found.tree.digest

    def restore_in_place(
        self, snapshot: Snapshot, directory: Path | str, *, baseline: Baseline, owner: Owner | None = None
    ) -> str:
        """Makes the directory, whatever is in it now, hold the snapshot; returns the digest of a scan after it.

        Only what differs is written; no process may use the directory. Raises what `restore` does, and leaves
        the directory in neither state then.
        """
        directory = Path(directory)
        epoch, target = self._index.epoch(), self._trees.load(snapshot.id)
        try:
            found = rewind(directory, target, baseline, self._contents(), owner, self._limits)
        except OSError as error:
            raise SnapshotError(f"cannot restore {snapshot.id} in {directory}: {error}") from error
        baseline.remember(found, snapshot.id, epoch, self.state(snapshot))
        return found.tree.digest

    def diff(self, before: Snapshot | None, after: Snapshot) -> tuple[Change, ...]:
        """What differs between two snapshots, in the order of paths. Raises SnapshotMissing."""
        old = EMPTY if before is None else self._trees.load(before.id)
        return changes(old.entries, difference(old.entries, self._trees.load(after.id).entries))

    def state(self, snapshot: Snapshot) -> dict[str, str]:
        """The strings that were recorded beside the tree. Raises SnapshotMissing."""
        return self._trees.state(snapshot.id)

    def __contains__(self, snapshot: Snapshot) -> bool:
        return self.has(snapshot.id)

    def has(self, snapshot_id: str) -> bool:
        """Whether the snapshot of this id can be restored."""
        return self._index.restorable(snapshot_id)

    def pin(self, snapshots: Named, owner: str) -> None:
        """Keeps snapshots, by record or id, from collection until the owner unpins them; raises SnapshotMissing.

        Unless `fsync` is "never" they outlast a power cut from here on.
        """
        wanted = ids(snapshots)
        packs = {
            pack for snapshot_id in wanted for pack in self._recorder.sync(self._trees.load(snapshot_id))
        }
        with self._index.writing(durable=True) as connection:
            self._check_there(connection, wanted)
            mark_synced(connection, sorted(packs))
            insert_pins(connection, wanted, owner)

    def hold(self, snapshots: Named, owner: str) -> None:
        """Pins snapshots that need not outlast a power cut, at no wait for the disk; raises SnapshotMissing."""
        wanted = ids(snapshots)
        with self._index.writing() as connection:
            self._check_there(connection, wanted)
            insert_pins(connection, wanted, owner)

    def unpin(self, snapshots: Named, owner: str) -> None:
        """Takes the owner's pins off these snapshots; fine where there are none."""
        with self._index.writing() as connection:
            rows = [(snapshot_id, owner) for snapshot_id in ids(snapshots)]
            connection.executemany("DELETE FROM pins WHERE snapshot = ? AND owner = ?", rows)

    def pins(self) -> dict[str, frozenset[str]]:
        """The ids that each owner has pinned."""
        found: dict[str, set[str]] = {}
        with self._index.reading() as connection:
            for snapshot_id, owner in connection.execute("SELECT snapshot, owner FROM pins"):
                found.setdefault(owner, set()).add(snapshot_id)
        return {owner: frozenset(snapshots) for owner, snapshots in found.items()}

    def delete(self, snapshots: Named, owner: str = "") -> None:
        """Takes the owner's pins off and forgets the snapshots, but for those that another owner has pinned.

        Their contents go with the next `sweep` or collection.
        """
        rows = [(snapshot_id,) for snapshot_id in ids(snapshots)]
        with self._index.writing() as connection:
            connection.executemany(
                "DELETE FROM pins WHERE snapshot = ? AND owner = ?", [(*row, owner) for row in rows]
            )
            connection.executemany(
                "UPDATE snapshots SET pruned = 1 WHERE id = ? AND id NOT IN (SELECT snapshot FROM pins)", rows
            )

    def collect(self, keep: Named = ()) -> Collected:
        """Drops the snapshots that are neither pinned nor named, and what only they needed; others may write.

        Raises SnapshotError.
        """
        return collect(self.path, self._index, keep)

    def sweep(self) -> Collected:
        """Frees what deleted snapshots alone needed; others may write. Raises SnapshotError."""
        return collect(self.path, self._index, None)

    def verify(self) -> list[Damage]:
        """Reads the whole store; what is not as it was put, by pack, content and snapshot. Raises SnapshotError."""
        return verify(self.path, self._index)

    def export_snapshot(self, snapshot: Snapshot, file: Path | str) -> None:
        """Writes the snapshot as one checked file. Raises SnapshotError."""
        tree = self._trees.load(snapshot.id)
        write_bundle(snapshot, tree, self.state(snapshot), self._contents(), Path(file))

    def import_snapshot(self, file: Path | str, *, pin: str | None = None) -> Snapshot:
        """Records a snapshot that any store exported, under the same id. Raises SnapshotError, SnapshotDamaged."""
        return self._recorder.adopt(lambda incoming: read_bundle(Path(file), incoming), pin)

    def statistics(self) -> Statistics:
        with self._index.reading() as connection:
            counts = connection.execute(
                "SELECT (SELECT count(*) FROM snapshots WHERE NOT pruned), (SELECT count(DISTINCT snapshot) FROM pins),"
                " (SELECT count(*) FROM blobs), (SELECT count(*) FROM packs)"
            ).fetchone()
        sizes = [path.stat().st_size for path in self.path.rglob("*") if path.is_file()]
        snapshots, pinned, blobs, packs = counts
        return Statistics(snapshots, pinned, blobs, packs, sum(sizes))

    def _is(self, snapshot: Snapshot, tree: Tree) -> bool:
        """Whether the snapshot is here and of this very tree, mtimes too."""
        if snapshot not in self:
            return False
        known = self._trees.load(snapshot.id)
        return known.sum == tree.sum and known.entries == tree.entries

    def _check_there(self, connection: sqlite3.Connection, wanted: Iterable[str]) -> None:
        for snapshot_id in wanted:
            row = read_row(connection, snapshot_id)
            if row is None or row.pruned:
                raise SnapshotMissing(f"no snapshot {snapshot_id} in the store {self.path}")

    def _contents(self) -> Contents:
        return Contents(self.path, self._index)
