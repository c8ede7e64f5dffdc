"""Which blobs the snapshots need, found by walking their manifests from each full one along its deltas."""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping

from midstream.envs.store.chunks import CHUNK_BYTES, chunk_hashes
from midstream.envs.store.contents import Contents
from midstream.envs.store.index import Row, read_row
from midstream.envs.store.records import Entry, Updates
from midstream.envs.store.trees import apply, read

# The content hash and the size of a file.
File = tuple[bytes, int]


def needed_rows(connection: sqlite3.Connection, live: Iterable[str]) -> set[str]:
    """The snapshots and those whose manifests they are relative to."""
    bases = dict(connection.execute("SELECT id, CASE WHEN full THEN NULL ELSE parent END FROM snapshots"))
    needed: set[str] = set()
    for snapshot_id in live:
        at: str | None = snapshot_id
        while at is not None and at in bases and at not in needed:
            needed.add(at)
            at = bases[at]
    return needed


def live_files(connection: sqlite3.Connection, live: set[str]) -> set[File]:
    """The contents of all files of these snapshots; costs no more than reading each manifest once."""
    found: set[File] = set()
    for root, children in _chains(connection, needed_rows(connection, live)):
        _Walk(connection, children, live, found).run(root)
    return found


def live_blobs(connection: sqlite3.Connection, live: set[str], contents: Contents) -> set[bytes]:
    """The hashes of all blobs that these snapshots need. Raises SnapshotDamaged, SnapshotMissing."""
    return blobs_of(live_files(connection, live), contents)


def blobs_of(files: Iterable[File], contents: Contents) -> set[bytes]:
    """The hashes of the blobs that these files are made of. Raises SnapshotDamaged, SnapshotMissing."""
    blobs: set[bytes] = set()
    for content, size in files:
        blobs.add(content)
        if size > CHUNK_BYTES:
            blobs.update(chunk_hashes(contents.blob(content)))
    return blobs


def broken_snapshots(
    connection: sqlite3.Connection, contents: Contents, lost: Callable[[set[bytes]], set[bytes]] | None = None
) -> dict[str, dict[bytes, bytes]]:
    """Restorable snapshots that lack a content: for each, the paths and the hash of the missing blob.

    `lost` tells which of some blobs are, by default those that the index does not have.
    """
    missing_from = lost or (lambda blobs: blobs - contents.existing(blobs))
    snapshots = [i for (i,) in connection.execute("SELECT id FROM snapshots WHERE NOT pruned ORDER BY rowid")]
    users: dict[bytes, set[bytes]] = {}
    for content, size in live_files(connection, set(snapshots)):
        blobs = [content, *(contents.chunk_hashes(content) if size > CHUNK_BYTES else ())]
        for blob in blobs:
            users.setdefault(blob, set()).add(content)
    missing = {content: blob for blob in missing_from(set(users)) for content in users[blob]}
    broken: dict[str, dict[bytes, bytes]] = {}
    if missing:
        for snapshot_id in snapshots:
            entries = entries_of(connection, snapshot_id)
            hit = {
                p: missing[e.content] for p, e in entries.items() if e.kind == "f" and e.content in missing
            }
            if hit:
                broken[snapshot_id] = hit
    return broken


def entries_of(connection: sqlite3.Connection, snapshot_id: str) -> dict[bytes, Entry]:
    """The tree of one snapshot. Raises SnapshotDamaged."""
    deltas = []
    row = read_row(connection, snapshot_id)
    while row is not None:
        deltas.append(read(row).updates)
        row = None if row.full or row.parent is None else read_row(connection, row.parent)
    entries: dict[bytes, Entry] = {}
    for updates in reversed(deltas):
        apply(entries, updates)
    return entries


def _chains(
    connection: sqlite3.Connection, needed: set[str]
) -> Iterator[tuple[str, Mapping[str, list[str]]]]:
    """Each full snapshot with the deltas that follow on each."""
    children: dict[str, list[str]] = {}
    roots = []
    for snapshot_id, parent, full in connection.execute("SELECT id, parent, full FROM snapshots"):
        if snapshot_id not in needed:
            continue
        if full:
            roots.append(snapshot_id)
        else:
            children.setdefault(parent, []).append(snapshot_id)
    for root in roots:
        yield root, children


def file_of(entry: Entry | None) -> File | None:
    """The content that an entry needs, if any."""
    return (entry.content, entry.size) if entry is not None and entry.kind == "f" and entry.size > 0 else None


class _Walk:
    """Goes through the states of one full snapshot and all deltas on it, and back, changing one set of files.

    A file counts where a live snapshot was visited while it was there: `_visited` numbers those visits, and
    each file remembers the number at which it came.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        children: Mapping[str, list[str]],
        live: set[str],
        found: set[File],
    ) -> None:
        self._connection = connection
        self._children = children
        self._live = live
        self._found = found
        self._visited = 0
        self._files: dict[bytes, tuple[File, int]] = {}

    def run(self, root: str) -> None:
        steps: list[tuple[str, list[tuple[bytes, File | None]] | None]] = [(root, None)]
        while steps:
            snapshot_id, undo = steps.pop()
            if undo is not None:
                for path, file in reversed(undo):
                    self._put(path, file)
                continue
            undo = self._enter(self._updates(snapshot_id))
            self._visited += snapshot_id in self._live
            steps.append((snapshot_id, undo))
            steps += [(child, None) for child in self._children.get(snapshot_id, ())]

    def _updates(self, snapshot_id: str) -> Updates:
        row: Row | None = read_row(self._connection, snapshot_id)
        assert row is not None
        return read(row).updates

    def _enter(self, updates: Updates) -> list[tuple[bytes, File | None]]:
        undo = []
        for path, entry in updates.items():
            undo.append((path, self._put(path, file_of(entry))))
        return undo

    def _put(self, path: bytes, file: File | None) -> File | None:
        """Makes this the file at the path; returns the one before."""
        before, since = self._files.pop(path, (None, 0))
        if before is not None and since < self._visited:
            self._found.add(before)
        if file is not None:
            self._files[path] = file, self._visited
        return before
