"""What the rows of a journal say. Raises JournalDamaged for a row that is not what was stored."""

import itertools
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator

from midstream.buffers.journal.errors import JournalDamaged, OwnershipError
from midstream.buffers.journal.records import Member, State, Summary, Waiting
from midstream.buffers.journal.schema import (
    CHECKPOINTS,
    GROUPS,
    MEMBERS,
    CheckpointRow,
    GroupRow,
    MemberRow,
    Row,
    Table,
    checksum_of,
)


def all_rows(connection: sqlite3.Connection, table: Table[Row]) -> Iterator[tuple[int, Row]]:
    """Every row, past ones too, with its number."""
    for values in connection.execute(f"{table.select} NOT INDEXED"):
        yield table.parse(values)


def check_file(connection: sqlite3.Connection) -> None:
    """Raises JournalDamaged unless all pages hang together and all rows are what was stored.

    What payloads hold is not compared with their checksums.
    """
    found = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != ("ok",):
        raise JournalDamaged(f"the pages of the journal do not hang together ({found[0]})")
    for _ in itertools.chain(all_rows(connection, GROUPS), all_rows(connection, MEMBERS)):
        pass  # to read a row is to check it


def group_of(connection: sqlite3.Connection, key: str) -> tuple[int, GroupRow] | None:
    """The row in force of a group, and its number."""
    values = connection.execute(f"{GROUPS.select} WHERE key = ? AND until IS NULL", (key,)).fetchone()
    return None if values is None else GROUPS.parse(values)


def groups_in(connection: sqlite3.Connection, states: Iterable[State]) -> list[tuple[int, GroupRow]]:
    """The rows in force of the groups in these states, in the order in which they go on."""
    among = ", ".join(f"'{state.value}'" for state in states)
    query = f"{GROUPS.select} WHERE until IS NULL AND state IN ({among}) ORDER BY place"
    return [GROUPS.parse(values) for values in connection.execute(query)]


def members_of(connection: sqlite3.Connection, key: str) -> list[tuple[int, MemberRow]]:
    """The rows in force of a group's rollouts, in order."""
    query = f"{MEMBERS.select} WHERE key = ? AND until IS NULL ORDER BY position"
    return [MEMBERS.parse(values) for values in connection.execute(query, (key,))]


def waiting_groups(connection: sqlite3.Connection) -> list[Waiting]:
    """The groups that wait, in order."""
    return [
        Waiting(
            row.key, tuple(summary_of(member) for _, member in _whole(connection, row)), row.begun_s, row.at_s
        )
        for _, row in groups_in(connection, (State.BUFFERED,))
    ]


def journaled_members(connection: sqlite3.Connection, key: str) -> tuple[Member, ...]:
    """A group's rollouts with their payloads. Raises OwnershipError where there is no such group."""
    present = group_of(connection, key)
    if present is None:
        raise OwnershipError(f"the journal has no group {key!r}: it was trained or dropped, or never taken")
    return tuple(
        Member(payload_of(connection, number, member), summary_of(member))
        for number, member in _whole(connection, present[1])
    )


def payload_of(connection: sqlite3.Connection, number: int, row: MemberRow) -> bytes:
    """A rollout's payload. Raises JournalDamaged unless it is what was written."""
    found = connection.execute("SELECT bytes FROM payloads WHERE member = ?", (number,)).fetchone()
    if found is None or not isinstance(found[0], bytes) or checksum_of(found[0]) != row.checksum:
        raise JournalDamaged(
            f"the record of rollout {row.position} of group {row.key!r} is damaged: drop the group"
        )
    return found[0]


def is_whole(connection: sqlite3.Connection, row: GroupRow) -> bool:
    """Whether all of a group's rollouts are there, and their payloads are what was written."""
    try:
        for number, member in _whole(connection, row):
            payload_of(connection, number, member)
    except JournalDamaged:
        return False
    return True


def _whole(connection: sqlite3.Connection, row: GroupRow) -> list[tuple[int, MemberRow]]:
    rows = members_of(connection, row.key)
    if [member.position for _, member in rows] != list(range(row.size)):
        raise JournalDamaged(f"group {row.key!r} has lost some of its {row.size} rollouts: drop it")
    return rows


def checkpoints(connection: sqlite3.Connection) -> list[CheckpointRow]:
    """The checkpoints, oldest first."""
    kept, again = (sorted(row for _, row in all_rows(connection, table)) for table in CHECKPOINTS)
    if kept != again:
        raise JournalDamaged("the two tables of checkpoints differ")
    return sorted(kept, key=lambda row: row.mark)


def last_mark(connection: sqlite3.Connection) -> int:
    """The number of the last transaction before the last checkpoint, 0 where there is none."""
    found = checkpoints(connection)
    return found[-1].mark if found else 0


def references_of(connection: sqlite3.Connection) -> Counter[str]:
    """How many rows refer to each snapshot."""
    references: Counter[str] = Counter()
    for _, row in all_rows(connection, MEMBERS):
        references.update(json.loads(row.snapshots))
    return references


def summary_of(row: MemberRow) -> Summary:
    """What the journal knows of the rollout."""
    return Summary(
        tokens=row.tokens,
        turns=row.turns,
        oldest_version=row.oldest,
        newest_version=row.newest,
        snapshots=tuple(json.loads(row.snapshots)),
        status=row.status,
    )
