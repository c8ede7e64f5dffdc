"""What a journal holds, seen from outside: beside a job that runs, or after one that is dead."""

import json
import sqlite3
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from midstream.buffers.journal.database import NAME, read_only
from midstream.buffers.journal.reading import checkpoints, groups_in, members_of, references_of
from midstream.buffers.journal.records import JournalStatus, Owned, State

_TALLIES = "SELECT state, reason, groups, rollouts, tokens, turns, bytes FROM tallies ORDER BY state, reason"
_IN_STATE = """
SELECT count(DISTINCT groups.id), count(members.id), coalesce(sum(tokens), 0), coalesce(sum(turns), 0),
    coalesce(sum(bytes), 0)
FROM groups LEFT JOIN members ON members.key = groups.key AND members.until IS NULL
WHERE groups.until IS NULL AND state = ?
"""


def status_of(directory: Path, *, clock: Callable[[], float] = time.time) -> JournalStatus:
    """The state of the journal in a directory, which is not changed.

    Raises:
        JournalError: there is none, it is of another version, or it cannot be read.
    """
    path = directory / NAME
    with read_only(path) as connection:
        return read_status(connection, path, clock())


def read_status(connection: sqlite3.Connection, path: Path, now_s: float) -> JournalStatus:
    """The state of the journal at ``path``, with ages at ``now_s``. Raises JournalDamaged."""
    waiting = [row for _, row in groups_in(connection, (State.BUFFERED,))]
    members = [member for row in waiting for _, member in members_of(connection, row.key)]
    tokens = [member.tokens for member in members]
    versions = [version for m in members for version in (m.oldest, m.newest) if version is not None]
    ages_s = [now_s - row.begun_s for row in waiting]
    ended = {(state, reason): Owned(*sums) for state, reason, *sums in connection.execute(_TALLIES)}
    return JournalStatus(
        taken=_owned(connection, State.TAKEN),
        buffered=_owned(connection, State.BUFFERED),
        handed=_owned(connection, State.HANDED),
        trained=ended.get((State.TRAINED.value, ""), Owned()),
        dropped={reason: owned for (state, reason), owned in ended.items() if state == State.DROPPED.value},
        oldest_age_s=max(ages_s, default=0.0),
        median_age_s=statistics.median(ages_s) if ages_s else 0.0,
        median_tokens=statistics.median(tokens) if tokens else 0.0,
        most_tokens=max(tokens, default=0),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        snapshots=tuple(sorted({snapshot for m in members for snapshot in json.loads(m.snapshots)})),
        snapshots_in_use=len(references_of(connection)),
        checkpoints=tuple(row.id for row in checkpoints(connection)),
        file_bytes=_file_bytes(path),
    )


def _owned(connection: sqlite3.Connection, state: State) -> Owned:
    return Owned(*connection.execute(_IN_STATE, (state.value,)).fetchone())


def _file_bytes(path: Path) -> int:
    """Of the file, and of the log beside it, which comes and goes."""
    total = path.stat().st_size
    try:
        return total + path.with_name(path.name + "-wal").stat().st_size
    except FileNotFoundError:
        return total
