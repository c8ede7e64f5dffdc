"""What a power cut may take: makes snapshots outlast one, and drops what an earlier one has taken."""

import os
import sqlite3
from pathlib import Path

from midstream.envs.errors import SnapshotDamaged
from midstream.envs.store.chunks import CHUNK_BYTES
from midstream.envs.store.contents import Contents, write_failed
from midstream.envs.store.index import Index, boot_id
from midstream.envs.store.liveness import broken_snapshots
from midstream.envs.store.packs import SUFFIX, check_pack, sync_directory
from midstream.envs.store.records import Tree

# With so few unsynced packs it costs less to sync all than to find those that a snapshot needs.
_FEW = 4


def sync_contents(store: Path, index: Index, tree: Tree) -> list[int]:
    """Syncs the packs that hold the tree's contents; returns their numbers, to be marked so. Raises SnapshotError."""
    with index.reading() as connection:
        unsynced = dict(connection.execute("SELECT name, id FROM packs WHERE NOT synced").fetchall())
    if len(unsynced) > _FEW:
        used = {location.pack for location in index.locate(contents_of(store, index, tree)).values()}
        unsynced = {name: number for name, number in unsynced.items() if name in used}
    for name in unsynced:
        path = store / "packs" / (name + SUFFIX)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # rewritten by a collector, which syncs
        try:
            os.fsync(fd)
        except OSError as error:
            raise write_failed(path, error) from error
        finally:
            os.close(fd)
    if unsynced:
        sync_directory(store / "packs")
    return list(unsynced.values())


def mark_synced(connection: sqlite3.Connection, packs: list[int]) -> None:
    connection.executemany("UPDATE packs SET synced = 1 WHERE id = ?", [(pack,) for pack in packs])


def contents_of(store: Path, index: Index, tree: Tree) -> set[bytes]:
    """The hashes of all blobs that the tree needs and that can be told from what is in the store."""
    contents = Contents(store, index)
    hashes = {entry.content for entry in tree.entries.values() if entry.kind == "f" and entry.size}
    large = {
        entry.content for entry in tree.entries.values() if entry.kind == "f" and entry.size > CHUNK_BYTES
    }
    for recipe_hash in large:
        hashes.update(contents.chunk_hashes(recipe_hash))
    return hashes


def drop_what_a_power_cut_took(store: Path, index: Index) -> None:
    """Checks the packs that were not synced before the machine went down, and forgets what they lost.

    The snapshots that needed it go with it: a snapshot is whole or absent.
    """
    with index.reading() as connection:
        query = "SELECT id, name, bytes FROM packs WHERE NOT synced AND boot <> ?"
        doubtful = connection.execute(query, (boot_id(),)).fetchall()
    if not doubtful:
        return
    lost, sound = [], []
    for number, name, size in doubtful:
        try:
            check_pack(store / "packs" / (name + SUFFIX), size)
            sound.append(number)
        except (OSError, SnapshotDamaged):
            lost.append(number)
    with index.writing() as connection:
        connection.executemany("UPDATE packs SET boot = ? WHERE id = ?", [(boot_id(), n) for n in sound])
        for number in lost:
            blocks = "(SELECT id FROM blocks WHERE pack = ?)"
            connection.execute(f"DELETE FROM blobs WHERE block IN {blocks}", (number,))
            connection.execute("DELETE FROM blocks WHERE pack = ?", (number,))
            connection.execute("DELETE FROM packs WHERE id = ?", (number,))
        if lost:
            connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
            broken = [(snapshot_id,) for snapshot_id in broken_snapshots(connection, Contents(store, index))]
            connection.executemany("UPDATE snapshots SET pruned = 1 WHERE id = ?", broken)
            connection.executemany("DELETE FROM pins WHERE snapshot = ?", broken)
