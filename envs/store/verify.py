"""Reads a whole store and names what is not as it was put."""

import sqlite3
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.errors import SnapshotDamaged
from midstream.envs.store.collect import alone
from midstream.envs.store.contents import Contents
from midstream.envs.store.index import Index, read_row
from midstream.envs.store.liveness import broken_snapshots
from midstream.envs.store.packs import SUFFIX, is_content, unpack_block
from midstream.envs.store.records import EMPTY, Tree, text
from midstream.envs.store.trees import Trees, read

# Trees of earlier snapshots that are kept at once, so that the next ones cost only what they change.
_TREES_AT_ONCE = 16

# Hash, offset in the block, size.
_Blob = tuple[bytes, int, int]


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong. `pack` is a file name, `contents` are hashes, `snapshots` ids that it hits.

    `paths` are files of the first of these snapshots.
    """

    what: str
    pack: str | None = None
    contents: tuple[str, ...] = ()
    snapshots: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


def verify(store: Path, index: Index) -> list[Damage]:
    """Checks every pack, content and snapshot; an empty list where all is sound. Raises SnapshotError.

    Raises SnapshotDamaged where the index itself cannot be read.
    """
    with alone(store), index.reading() as connection:
        _check_index(index, connection)
        bad_packs = _check_packs(store, connection)
        lost = {blob for _, blobs in bad_packs.values() for blob in blobs}
        contents = Contents(store, index)
        found = _check_snapshots(index, connection)
        if found:
            return found + [Damage(what, pack, _hex(blobs)) for pack, (what, blobs) in bad_packs.items()]
        broken = broken_snapshots(
            connection, contents, lambda blobs: (blobs - contents.existing(blobs)) | blobs & lost
        )
    for pack, (what, blobs) in bad_packs.items():
        hit = {i: [p for p, blob in paths.items() if blob in blobs] for i, paths in broken.items()}
        hit = {snapshot_id: paths for snapshot_id, paths in hit.items() if paths}
        first = next(iter(hit.values()), [])
        found.append(Damage(what, pack, _hex(blobs), tuple(hit), tuple(map(text, first))))
    for snapshot_id, files in broken.items():
        nowhere = {path: blob for path, blob in files.items() if blob not in lost}
        if nowhere:
            what = "contents are in no pack"
            names = tuple(map(text, nowhere))
            found.append(Damage(what, None, _hex(set(nowhere.values())), (snapshot_id,), names))
    return found


def _hex(blobs: set[bytes]) -> tuple[str, ...]:
    return tuple(sorted(blob.hex() for blob in blobs))


def _check_index(index: Index, connection: sqlite3.Connection) -> None:
    rows = [text for (text,) in connection.execute("PRAGMA integrity_check")]
    if rows != ["ok"]:
        raise SnapshotDamaged(
            f"the index {index.path} is damaged ({'; '.join(rows[:3])}): move the store's directory away and begin"
            " a new one, with the snapshots that were exported"
        )


def _check_packs(store: Path, connection: sqlite3.Connection) -> dict[str, tuple[str, set[bytes]]]:
    """What is wrong with each damaged pack, and the blobs that it lost."""
    bad: dict[str, tuple[str, set[bytes]]] = {}
    for number, name, size in connection.execute("SELECT id, name, bytes FROM packs").fetchall():
        path = store / "packs" / (name + SUFFIX)
        blocks = _blocks(connection, number)
        faults: list[str] = []
        lost: set[bytes] = set()
        try:
            with path.open("rb") as file:
                found = path.stat().st_size
                if found != size:
                    faults.append(f"{path} has {found} bytes instead of {size}")
                for (offset, length), indexed in blocks.items():
                    file.seek(offset)
                    fault, blobs = _check_block(indexed, file.read(length), f"{path} at {offset}")
                    faults += fault
                    lost |= blobs
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
            lost = {blob_hash for indexed in blocks.values() for blob_hash, _, _ in indexed}
        if faults:
            bad[name + SUFFIX] = "; ".join(faults), lost
    return bad


def _blocks(connection: sqlite3.Connection, pack: int) -> dict[tuple[int, int], list[_Blob]]:
    """The blobs of each block of a pack, by where the block is: offset and length."""
    query = (
        "SELECT blocks.offset, length, hash, blobs.offset, size FROM blocks JOIN blobs ON block = blocks.id"
        " WHERE pack = ? ORDER BY blocks.offset"
    )
    blocks: dict[tuple[int, int], list[_Blob]] = {}
    for offset, length, *blob in connection.execute(query, (pack,)):
        blob_hash, start, size = blob
        blocks.setdefault((offset, length), []).append((blob_hash, start, size))
    return blocks


def _check_block(indexed: list[_Blob], stored: bytes, where: str) -> tuple[list[str], set[bytes]]:
    try:
        _, content = unpack_block(stored, where)
    except SnapshotDamaged as fault:
        return [str(fault)], {blob_hash for blob_hash, _, _ in indexed}
    lost = {h for h, offset, size in indexed if not is_content(h, content[offset : offset + size])}
    return ([f"{where}: other bytes than the index says"] if lost else []), lost


def _check_snapshots(index: Index, connection: sqlite3.Connection) -> list[Damage]:
    """Snapshots whose records are damaged, or do not have the digest that they name."""
    found: list[Damage] = []
    trees = Trees(index)
    sound: OrderedDict[str, Tree] = OrderedDict()
    for snapshot_id, pruned in connection.execute(
        "SELECT id, pruned FROM snapshots ORDER BY rowid"
    ).fetchall():
        row = read_row(connection, snapshot_id)
        assert row is not None
        try:
            manifest = read(row)
            base = EMPTY if manifest.full else sound.get(str(manifest.parent))
            if base is None and not pruned:
                base = EMPTY.updated(trees.load(str(snapshot_id)).entries)
            if base is None:
                continue
            tree = base.updated(manifest.updates)
            if tree.sum != manifest.sum or tree.digest != row.digest:
                found.append(Damage("its records do not have its digest", snapshots=(snapshot_id,)))
            sound[snapshot_id] = tree
            if len(sound) > _TREES_AT_ONCE:
                sound.popitem(last=False)
        except SnapshotDamaged as fault:
            found.append(Damage(str(fault), snapshots=(snapshot_id,)))
    return found
