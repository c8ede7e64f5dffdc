"""What a collection drops: made while others write, then corrected by what they have written since."""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from midstream.envs.errors import SnapshotDamaged, SnapshotMissing
from midstream.envs.store.contents import Contents
from midstream.envs.store.index import read_row
from midstream.envs.store.liveness import File, blobs_of, entries_of, file_of, live_blobs, needed_rows
from midstream.envs.store.records import Entry
from midstream.envs.store.trees import read


@dataclass
class Plan:
    """`live` snapshots stay, `needed` are they and those that they are relative to, `dead` are blobs that go.

    `seen` are all that could be restored when the plan was made.
    """

    seen: set[str]
    live: set[str]
    needed: set[str]
    dead: set[bytes]


def make_plan(connection: sqlite3.Connection, keep: set[str] | None, contents: Contents) -> Plan:
    """Keeps the snapshots that are pinned or named, or all with None; walks the manifests of all of them."""
    seen = set(_restorable(connection))
    live = seen.copy() if keep is None else seen & (keep | _pinned(connection))
    try:
        blobs = live_blobs(connection, live, contents)
        dead = {h for (h,) in connection.execute("SELECT hash FROM blobs") if h not in blobs}
    except (SnapshotDamaged, SnapshotMissing):
        # What cannot be read may name any of them: all stay, until the damaged snapshot is deleted.
        dead = set()
    return Plan(seen, live, needed_rows(connection, live), dead)


def spare_newer(connection: sqlite3.Connection, plan: Plan, contents: Contents) -> None:
    """Keeps, too, what was recorded, made restorable again, or pinned since; costs what those changed.

    A blob that came since is not among the dead ones.
    """
    restorable = _restorable(connection)
    pinned = _pinned(connection)
    for snapshot_id in restorable:
        newer = snapshot_id not in plan.seen or (snapshot_id in pinned and snapshot_id not in plan.live)
        if newer:
            _spare(connection, snapshot_id, plan, contents)


def _spare(connection: sqlite3.Connection, snapshot_id: str, plan: Plan, contents: Contents) -> None:
    try:
        if plan.dead:
            # A new file may be made of old chunks.
            plan.dead -= blobs_of(_files(connection, snapshot_id, plan), contents)
    except (SnapshotDamaged, SnapshotMissing):
        plan.dead = set()
    plan.seen.add(snapshot_id)
    plan.live.add(snapshot_id)
    at: str | None = snapshot_id
    while at is not None and at not in plan.needed:
        plan.needed.add(at)
        row = read_row(connection, at)
        at = None if row is None or row.full else row.parent


def _files(connection: sqlite3.Connection, snapshot_id: str, plan: Plan) -> set[File]:
    """The files that the snapshot adds to those of live ones."""
    row = read_row(connection, snapshot_id)
    assert row is not None
    entries: Iterable[Entry | None]
    if row.full or row.parent in plan.live:
        entries = read(row).updates.values()
    else:
        entries = entries_of(connection, snapshot_id).values()
    return {file for entry in entries if (file := file_of(entry)) is not None}


def _restorable(connection: sqlite3.Connection) -> list[str]:
    """Parents come before what is relative to them."""
    query = "SELECT id FROM snapshots WHERE NOT pruned ORDER BY rowid"
    return [snapshot_id for (snapshot_id,) in connection.execute(query)]


def _pinned(connection: sqlite3.Connection) -> set[str]:
    return {snapshot_id for (snapshot_id,) in connection.execute("SELECT snapshot FROM pins")}
