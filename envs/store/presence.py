"""Which snapshots a store has, seen from outside, beside jobs that use it; nothing in it is changed."""

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.errors import SnapshotError
from midstream.envs.store.index import BUSY_TIMEOUT_S, FORMAT
from midstream.envs.store.packs import SUFFIX
from midstream.envs.store.unchanged import read_unchanged


@dataclass(frozen=True)
class Presence:
    """Of the ids asked for, those that cannot be restored; `bytes` is what the whole store takes on disk.

    `lost_packs` are files of contents that are gone, though the store has not removed them: which snapshots have a
    part in them is found out when one is restored.
    """

    missing: frozenset[str]
    bytes: int
    lost_packs: frozenset[str] = frozenset()


def presence_of(store: Path, snapshot_ids: Collection[str]) -> Presence | None:
    """What the store in a directory has of these snapshots, None where there is no store.

    Raises SnapshotError where it cannot be read, or is of another version.
    """
    path = store / "index.sqlite"

    def recorded() -> tuple[frozenset[str], frozenset[str]]:
        return read_unchanged(path, lambda found: _recorded(found, path), timeout_s=BUSY_TIMEOUT_S)

    try:
        there, packs = recorded()
        lost = frozenset(name for name in packs if not (store / "packs" / f"{name}{SUFFIX}").exists())
        if lost:
            # A collector may have removed them meanwhile.
            lost &= recorded()[1]
        return Presence(frozenset(snapshot_ids) - there, _bytes_below(store), lost)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, sqlite3.Error) as error:
        raise SnapshotError(f"cannot read the snapshot store {store} ({error}): mend access to it") from error


def _recorded(connection: sqlite3.Connection, path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """The snapshots that can be restored, and the packs that hold their contents, as the index has them."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if found != (FORMAT,):
        raise SnapshotError(
            f"{path} has format {found and found[0]}, this version reads {FORMAT}: look with the version that wrote it"
        )
    queries = ("SELECT id FROM snapshots WHERE NOT pruned", "SELECT name FROM packs")
    snapshots, packs = (frozenset(name for (name,) in connection.execute(query)) for query in queries)
    return snapshots, packs


def _bytes_below(store: Path) -> int:
    total = 0
    for path in store.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # a pack that a collector has rewritten meanwhile
    return total
