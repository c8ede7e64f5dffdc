"""Deletes snapshots that nobody wants any longer, and what only they needed, beside whoever writes."""

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.errors import SnapshotDamaged, SnapshotMissing
from midstream.envs.protocol import Snapshot
from midstream.envs.store.contents import Contents, write_failed
from midstream.envs.store.index import Index, insert_pack
from midstream.envs.store.packs import SUFFIX, Pack
from midstream.envs.store.plan import Plan, make_plan, spare_newer

# Packs of which less than this is needed are written anew.
MIN_LIVE_SHARE = 0.5
_REWRITE_BYTES = 64 << 20

Named = Iterable[Snapshot | str]


@dataclass(frozen=True)
class Collected:
    """What a collection removed: `bytes` on disk, `snapshots` that can no longer be restored, `blobs`, `packs`.

    `leftovers` are packs that a crash had left without a snapshot.
    """

    bytes: int = 0
    snapshots: int = 0
    blobs: int = 0
    packs: int = 0
    leftovers: int = 0


def ids(snapshots: Named) -> list[str]:
    """Ids of snapshots that are given as records or by id."""
    return [snapshot if isinstance(snapshot, str) else snapshot.id for snapshot in snapshots]


def collect(store: Path, index: Index, keep: Named | None = ()) -> Collected:
    """Drops the snapshots that are neither pinned nor named, then blobs and packs without a use.

    With `keep` None only what was deleted before goes. A snapshot between its `put` and its pin is not pinned: have
    it pinned by `put`. While a wanted snapshot is damaged no blob is deleted. Raises SnapshotError.
    """
    with alone(store):
        dropped, blobs, packs = _drop(index, None if keep is None else set(ids(keep)), Contents(store, index))
        packs += _rewrite_mostly_dead(store, index)
        freed = sum(_unlink(store / "packs" / (name + SUFFIX)) for name in packs)
        leftovers = _remove_leftovers(store, index)
        with index.reading() as connection:
            # A script is run to its end; `execute` frees one page.
            connection.executescript("PRAGMA incremental_vacuum")
    return Collected(freed + sum(leftovers), dropped, blobs, len(packs), len(leftovers))


@contextmanager
def alone(store: Path) -> Iterator[None]:
    """Keeps collectors out: they wait for the end of the block, as it does for theirs."""
    fd = os.open(store / "collect.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _drop(index: Index, keep: set[str] | None, contents: Contents) -> tuple[int, int, list[str]]:
    """Takes unwanted snapshots, their blobs and empty packs out of the index: how many, how many, which packs.

    The plan is made while others write; writers wait only while what came since is added to what stays.
    """
    with index.reading() as connection:
        connection.execute("BEGIN")
        try:
            plan = make_plan(connection, keep, contents)
        finally:
            connection.execute("ROLLBACK")
        # Most of what came meanwhile, so that little is left for the time in which writers wait.
        connection.execute("BEGIN")
        try:
            spare_newer(connection, plan, contents)
        finally:
            connection.execute("ROLLBACK")
    with index.writing() as connection:
        spare_newer(connection, plan, contents)
        dropped = _drop_snapshots(connection, plan)
        return dropped, len(plan.dead), _drop_blobs(connection, list(plan.dead))


def _drop_snapshots(connection: sqlite3.Connection, plan: Plan) -> int:
    rows = connection.execute("SELECT id, pruned FROM snapshots").fetchall()
    gone = [(snapshot_id,) for snapshot_id, _ in rows if snapshot_id not in plan.needed]
    pruned = [(i,) for i, already in rows if i in plan.needed and i not in plan.live and not already]
    connection.executemany("DELETE FROM snapshots WHERE id = ?", gone)
    connection.executemany("UPDATE snapshots SET pruned = 1 WHERE id = ?", pruned)
    return len(pruned) + sum(not already for i, already in rows if i not in plan.needed)


def _drop_blobs(connection: sqlite3.Connection, dead: list[bytes]) -> list[str]:
    """Names of the packs that hold nothing any more; whoever relies on an older epoch must look again."""
    if dead:
        connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
        connection.executemany("DELETE FROM blobs WHERE hash = ?", [(blob_hash,) for blob_hash in dead])
    connection.execute("DELETE FROM blocks WHERE id NOT IN (SELECT block FROM blobs)")
    empty = "id NOT IN (SELECT pack FROM blocks)"
    names = [name for (name,) in connection.execute(f"SELECT name FROM packs WHERE {empty}")]
    connection.execute(f"DELETE FROM packs WHERE {empty}")
    return names


def _rewrite_mostly_dead(store: Path, index: Index) -> list[str]:
    """Writes what is still needed of packs that hold little of it into new ones; returns the old ones' names."""
    with index.reading() as connection:
        query = (
            "SELECT packs.id, packs.name, sum(size) FROM packs JOIN blocks ON pack = packs.id"
            " JOIN blobs ON block = blocks.id GROUP BY packs.id HAVING sum(size) < ? * packs.raw"
        )
        candidates = connection.execute(query, (MIN_LIVE_SHARE,)).fetchall()
    rewritten: list[str] = []
    batch: list[tuple[int, str]] = []
    batch_bytes = 0
    for number, name, size in candidates:
        batch.append((number, name))
        batch_bytes += size
        if batch_bytes >= _REWRITE_BYTES:
            rewritten += _rewrite(store, index, batch)
            batch, batch_bytes = [], 0
    if batch:
        rewritten += _rewrite(store, index, batch)
    return rewritten


def _rewrite(store: Path, index: Index, packs: list[tuple[int, str]]) -> list[str]:
    contents = Contents(store, index)
    numbers = [number for number, _ in packs]
    marks = ", ".join("?" * len(numbers))
    with index.reading() as connection:
        query = (
            "SELECT hash, block FROM blobs JOIN blocks ON blocks.id = block"
            f" WHERE pack IN ({marks}) ORDER BY pack, blocks.offset, blobs.offset"
        )
        old_blocks = dict(connection.execute(query, numbers).fetchall())
    contents.locate(old_blocks)
    new = Pack(store)
    kept = False
    try:
        for blob_hash in old_blocks:
            new.add(blob_hash, contents.blob(blob_hash))
        # What was synced must stay so.
        new.finish(sync=True)
        with index.writing() as connection:
            rows = insert_pack(connection, new.name, new.bytes, new.blocks, synced=True)
            connection.executemany(
                "UPDATE blobs SET block = ?, offset = ?, size = ? WHERE hash = ?",
                [(block, offset, size, blob_hash) for blob_hash, block, offset, size in rows],
            )
            connection.execute(f"DELETE FROM blocks WHERE pack IN ({marks})", numbers)
            connection.execute(f"DELETE FROM packs WHERE id IN ({marks})", numbers)
        kept = True
    except (SnapshotDamaged, SnapshotMissing):
        # What is damaged stays where it is, for `verify` to name.
        return []
    except OSError as error:
        raise write_failed(new.path, error) from error
    finally:
        new.close(keep=kept)
    return [name for _, name in packs]


def _remove_leftovers(store: Path, index: Index) -> list[int]:
    """Removes packs that no snapshot uses and whose writer is gone; returns their sizes."""
    paths = [*(store / "tmp").iterdir(), *(store / "packs").iterdir()]
    sizes = [_remove_leftover(path, index) for path in paths if not _known(path, index)]
    return [size for size in sizes if size is not None]


def _remove_leftover(path: Path, index: Index) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    else:
        # Its writer may have come to its end just before the lock was free.
        return None if _known(path, index) else _unlink(path)
    finally:
        os.close(fd)


def _known(path: Path, index: Index) -> bool:
    with index.reading() as connection:
        query = "SELECT 1 FROM packs WHERE name = ?"
        return connection.execute(query, (path.name.removesuffix(SUFFIX),)).fetchone() is not None


def _unlink(path: Path) -> int:
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size
