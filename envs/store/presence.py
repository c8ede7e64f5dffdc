"""Which snapshots a store has, seen from outside, beside jobs that use it; nothing in it is changed."""

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.errors import SnapshotError
from midstream.envs.store.index import BUSY_TIMEOUT_S, FORMAT
from midstream.envs.store.unchanged import read_unchanged


@dataclass(frozen=True)
class Presence:
    """Of the ids asked for, those that cannot be restored; `bytes` is what the whole store takes on disk."""

    missing: frozenset[str]
    bytes: int


def presence_of(store: Path, snapshot_ids: Collection[str]) -> Presence | None:
    """What the store in a directory has of these snapshots, None where there is no store.

    Raises SnapshotError where it cannot be read, or is of another version.
    """
    path = store / "index.sqlite"
    try:
        there = read_unchanged(
            path, lambda connection: _restorable(connection, path), timeout_s=BUSY_TIMEOUT_S
        )
        return Presence(frozenset(snapshot_ids) - there, _bytes_below(store))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, sqlite3.Error) as error:
        raise SnapshotError(f"cannot read the snapshot store {store} ({error}): mend access to it") from error


def _restorable(connection: sqlite3.Connection, path: Path) -> frozenset[str]:
    found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if found != (FORMAT,):
        raise SnapshotError(
            f"{path} has format {found and found[0]}, this version reads {FORMAT}: look with the version that wrote it"
        )
    return frozenset(name for (name,) in connection.execute("SELECT id FROM snapshots WHERE NOT pruned"))


def _bytes_below(store: Path) -> int:
    total = 0
    for path in store.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # a pack that a collector has rewritten meanwhile
    return total
