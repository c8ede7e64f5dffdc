"""The index of a store: which snapshots there are, and in which block of which pack each blob lies.

SQLite in write-ahead mode, so that readers and one writer work side by side, in threads and processes of one
host. A snapshot and its blobs come in one transaction. The epoch, a number, rises whenever blobs are deleted:
whoever remembers that a blob was there asks whether the epoch is still the same.
"""

import functools
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from midstream.envs.errors import SnapshotDamaged, SnapshotError
from midstream.envs.store.packs import Block, Location

FORMAT = 2
Fsync = Literal["pinned", "always", "never"]
BUSY_TIMEOUT_S = 60.0
# SQLite takes 32,766 variables; statements of this many are prepared once and cost little each.
_BATCH = 500

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE packs (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, bytes INTEGER, raw INTEGER, synced INTEGER,
    boot TEXT);
CREATE TABLE blocks (id INTEGER PRIMARY KEY AUTOINCREMENT, pack INTEGER, offset INTEGER, length INTEGER, raw INTEGER);
CREATE INDEX blocks_of_pack ON blocks (pack);
CREATE TABLE blobs (hash BLOB PRIMARY KEY, block INTEGER, offset INTEGER, size INTEGER) WITHOUT ROWID;
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY, parent TEXT, full INTEGER, digest TEXT, manifest BLOB, checksum BLOB, bytes INTEGER,
    depth INTEGER, chain_bytes INTEGER, full_bytes INTEGER, created_s REAL, pruned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX blobs_of_block ON blobs (block);
CREATE TABLE pins (snapshot TEXT, owner TEXT, PRIMARY KEY (snapshot, owner)) WITHOUT ROWID;
"""


class Row(NamedTuple):
    """A snapshot as the index has it. `parent` is the base of its manifest unless `full`.

    `depth` counts the manifests back to the last full one, `chain_bytes` is their size without that one,
    `full_bytes` its size. `pruned`: only needed to read others, its contents may be gone.
    """

    id: str
    parent: str | None
    full: bool
    digest: str
    manifest: bytes
    checksum: bytes
    bytes: int
    depth: int
    chain_bytes: int
    full_bytes: int
    created_s: float
    pruned: bool


# Connections of a parent process.
_inherited: list[sqlite3.Connection] = []


class EpochMoved(Exception):
    """Blobs were deleted since the epoch that a writer relies on."""


class Index:
    """One store's index. Threads share it, each with a connection of its own; a forked child opens its own."""

    def __init__(self, path: Path, fsync: Fsync) -> None:
        """Opens or creates it. Raises SnapshotError."""
        self.path = path
        self._fsync = fsync
        self._local = threading.local()
        with self.reading() as connection:
            made = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
        if not made:
            self._make()
        with self.reading() as connection:
            (found,) = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        if found != FORMAT:
            raise SnapshotError(
                f"{path} has format {found}, this version reads {FORMAT}: use another directory"
            )

    def _make(self) -> None:
        with self.writing() as connection:
            # Another process may have been first.
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                for statement in _SCHEMA.split(";\n"):
                    connection.execute(statement)
                facts = [("format", FORMAT), ("epoch", 0)]
                connection.executemany("INSERT INTO meta VALUES (?, ?)", facts)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection; what fails in the block is told as SnapshotError or SnapshotDamaged."""
        try:
            yield self._connection()
        except sqlite3.Error as error:
            raise _told(self.path, error) from error

    @contextmanager
    def writing(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction that sees no other writer: all of it happens, or nothing. `durable` outlasts a power cut."""
        with self.reading() as connection:
            if self._fsync != "never":
                level = "FULL" if durable or self._fsync == "always" else "NORMAL"
                connection.execute(f"PRAGMA synchronous = {level}")
            with transaction(connection):
                yield connection

    def _connection(self) -> sqlite3.Connection:
        known: tuple[int, sqlite3.Connection] | None = getattr(self._local, "connection", None)
        if known is not None and known[0] == os.getpid():
            return known[1]
        if known is not None:
            # The parent's: to close it here could touch files that the parent uses.
            _inherited.append(known[1])
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA synchronous = {'OFF' if self._fsync == 'never' else 'NORMAL'}")
        self._local.connection = os.getpid(), connection
        return connection

    def epoch(self) -> int:
        with self.reading() as connection:
            return read_epoch(connection)

    def existing(self, hashes: Iterable[bytes]) -> set[bytes]:
        """Those of the hashes whose blob is in a pack."""
        found: set[bytes] = set()
        with self.reading() as connection:
            for some in _batches(hashes):
                found.update(h for (h,) in connection.execute(_among("SELECT hash FROM blobs", some), some))
        return found

    def locate(self, hashes: Iterable[bytes]) -> dict[bytes, Location]:
        """Where the blobs are; those that are nowhere are left out."""
        query = (
            "SELECT hash, packs.name, blocks.offset, blocks.length, blobs.offset, size"
            " FROM blobs JOIN blocks ON blocks.id = block JOIN packs ON packs.id = pack"
        )
        found: dict[bytes, Location] = {}
        with self.reading() as connection:
            for some in _batches(hashes):
                rows = connection.execute(_among(query, some), some)
                found.update((blob_hash, Location(*where)) for blob_hash, *where in rows)
        return found

    def row(self, snapshot_id: str) -> Row | None:
        with self.reading() as connection:
            return read_row(connection, snapshot_id)

    def restorable(self, snapshot_id: str) -> bool:
        with self.reading() as connection:
            query = "SELECT 1 FROM snapshots WHERE id = ? AND NOT pruned"
            return connection.execute(query, (snapshot_id,)).fetchone() is not None


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One that sees no other writer: all of the block happens, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """For good, by whoever opens the file first; those who come at the same moment try again."""
    deadline_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
                return
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def read_epoch(connection: sqlite3.Connection) -> int:
    (epoch,) = connection.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
    return int(epoch)


def read_row(connection: sqlite3.Connection, snapshot_id: str) -> Row | None:
    row = connection.execute("SELECT * FROM snapshots WHERE id = ?", (snapshot_id,)).fetchone()
    return None if row is None else Row(*row)


def insert_pack(
    connection: sqlite3.Connection, name: str, size: int, blocks: Sequence[Block], *, synced: bool
) -> list[tuple[bytes, int, int, int]]:
    """Adds a pack and its blocks; returns the rows of its blobs: hash, block, offset, size."""
    cursor = connection.execute(
        "INSERT INTO packs (name, bytes, raw, synced, boot) VALUES (?, ?, ?, ?, ?)",
        (name, size, sum(block.raw for block in blocks), synced, boot_id()),
    )
    pack, rows = cursor.lastrowid, []
    for block in blocks:
        cursor = connection.execute(
            "INSERT INTO blocks (pack, offset, length, raw) VALUES (?, ?, ?, ?)",
            (pack, block.offset, block.length, block.raw),
        )
        assert cursor.lastrowid is not None
        number = cursor.lastrowid
        rows += [(blob_hash, number, offset, size) for blob_hash, offset, size in block.blobs]
    return rows


def insert_blobs(connection: sqlite3.Connection, rows: Iterable[tuple[bytes, int, int, int]]) -> None:
    """Adds blobs; one that another writer added meanwhile stays where that put it."""
    connection.executemany("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)", rows)


def insert_snapshot(connection: sqlite3.Connection, row: Row) -> None:
    """Adds a snapshot, or makes one whole again that was kept for others alone."""
    marks = ", ".join("?" * len(row))
    connection.execute(
        f"INSERT INTO snapshots VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET pruned = 0", row
    )


def insert_pins(connection: sqlite3.Connection, snapshot_ids: Iterable[str], owner: str) -> None:
    rows = [(snapshot_id, owner) for snapshot_id in snapshot_ids]
    connection.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", rows)


@functools.cache
def boot_id() -> str:
    """Names this run of the machine: what an earlier one did not sync may be lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().decode("ascii").strip()
    except OSError:
        return ""


def now_s() -> float:
    return time.time()


def _batches(hashes: Iterable[bytes]) -> Iterator[list[bytes]]:
    every = list(hashes)
    for at in range(0, len(every), _BATCH):
        yield every[at : at + _BATCH]


def _among(query: str, some: Sequence[Any]) -> str:
    return f"{query} WHERE hash IN ({', '.join('?' * len(some))})"


def _told(path: Path, error: sqlite3.Error) -> SnapshotError:
    """What a fault of SQLite means here."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        reason = "No space left on device" if code == sqlite3.SQLITE_FULL else str(error)
        return SnapshotError(f"cannot write {path}: {reason}; free space or set snapshots.path elsewhere")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return SnapshotError(
            f"{path} is in use by another writer for more than {BUSY_TIMEOUT_S:g} s: try again"
        )
    return SnapshotDamaged(
        f"the index {path} is damaged ({error}): stop what uses the store, move its directory away and begin a"
        " new one, with the snapshots that were exported"
    )
