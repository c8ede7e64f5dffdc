"""What a journal holds, seen from outside: beside a job that runs, or after one that is dead."""

import contextlib
import json
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from midstream.buffers.journal.database import NAME, read_beside
from midstream.buffers.journal.errors import JournalDamaged
from midstream.buffers.journal.reading import groups_in, journaled_members, summary_of
from midstream.buffers.journal.records import GroupStatus, JournalStatus, Member, Owned, State, versions_of
from midstream.buffers.journal.schema import CHECKPOINTS, GROUPS, MEMBERS, GroupRow, MemberRow, Row, Table

Found = TypeVar("Found")

_TALLIES = "SELECT state, reason, groups, rollouts, tokens, turns, bytes FROM tallies ORDER BY state, reason"


def status_of(directory: Path, *, clock: Callable[[], float] = time.time) -> JournalStatus:
    """The state of the journal in a directory, which is not changed. Rows that are damaged are counted.

    Raises:
        JournalError: there is none, it is of another version, or it cannot be read.
    """
    path = directory / NAME
    return read_beside(path, lambda connection: read_status(connection, path, clock()))


def look_at_waiting(directory: Path, look: Callable[[Iterator[Member]], Found]) -> Found:
    """What ``look`` makes of the rollouts that wait, group by group in the order in which they go on.

    They are read one after another, so that it may stop early. Groups that are damaged are passed over. Raises what
    `status_of` does.
    """
    return read_beside(directory / NAME, lambda connection: look(_waiting_members(connection)))


def _waiting_members(connection: sqlite3.Connection) -> Iterator[Member]:
    for _, group in groups_in(connection, (State.BUFFERED,)):
        with contextlib.suppress(JournalDamaged):
            yield from journaled_members(connection, group.key)


def read_status(connection: sqlite3.Connection, path: Path, now_s: float) -> JournalStatus:
    """The state of the journal at ``path``, where ``now_s`` is now."""
    damaged: Counter[str] = Counter()
    members = list(_sound(connection, MEMBERS, damaged))
    in_force: dict[str, list[MemberRow]] = defaultdict(list)
    for member in members:
        if member.until is None:
            in_force[member.key].append(member)
    groups = [row for row in _sound(connection, GROUPS, damaged) if row.until is None]
    versions = versions_of(map(summary_of, members))
    # Both tables have the same, and damage to one of them costs nothing.
    checkpoints = {row.id: row.mark for table in CHECKPOINTS for row in _sound(connection, table, damaged)}
    ended = {(state, reason): Owned(*sums) for state, reason, *sums in connection.execute(_TALLIES)}
    return JournalStatus(
        at_s=now_s,
        groups=tuple(
            _group(row, in_force[row.key]) for row in sorted(groups, key=lambda row: (row.place, row.key))
        ),
        trained=ended.get((State.TRAINED.value, ""), Owned()),
        dropped={reason: owned for (state, reason), owned in ended.items() if state == State.DROPPED.value},
        newest_version=None if versions is None else versions[1],
        snapshots_in_use=frozenset(
            snapshot for member in members for snapshot in json.loads(member.snapshots)
        ),
        checkpoints=tuple(sorted(checkpoints, key=checkpoints.__getitem__)),
        damaged_rows=damaged.total(),
        file_bytes=_file_bytes(path),
    )


def _sound(connection: sqlite3.Connection, table: Table[Row], damaged: Counter[str]) -> Iterator[Row]:
    """The rows that match their seals, past ones too; counts the others."""
    for values in connection.execute(f"{table.select} NOT INDEXED"):
        try:
            _, row = table.parse(values)
        except JournalDamaged:
            damaged[table.name] += 1
        else:
            yield row


def _group(row: GroupRow, members: list[MemberRow]) -> GroupStatus:
    members = sorted(members, key=lambda member: member.position)
    return GroupStatus(
        row.key,
        State(row.state),
        row.step,
        row.begun_s,
        row.at_s,
        tuple(map(summary_of, members)),
        sum(member.bytes for member in members),
        lost=max(0, row.size - len(members)),
    )


def _file_bytes(path: Path) -> int:
    """Of the file, and of the log beside it, which comes and goes."""
    total = path.stat().st_size
    try:
        return total + path.with_name(path.name + "-wal").stat().st_size
    except FileNotFoundError:
        return total
