"""One transaction's change of a journal: rows go out of force, others come into force."""

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Any

from midstream.buffers.journal.reading import members_of
from midstream.buffers.journal.records import Member, State
from midstream.buffers.journal.schema import (
    GROUPS,
    MEMBERS,
    GroupRow,
    MemberRow,
    Table,
    Versioned,
    checksum_of,
    sealed,
)

_TALLY = """
INSERT INTO tallies VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET groups = groups + excluded.groups, rollouts = rollouts + excluded.rollouts,
    tokens = tokens + excluded.tokens, turns = turns + excluded.turns, bytes = bytes + excluded.bytes
"""


class Change:
    """What one transaction does to the rows.

    `number` is the transaction's. A row that came into force after transaction `mark`, the last checkpoint's, is
    never revived, so it is deleted when it goes out of force; an older one stays. `references` is by how much the
    number of rows that refer to a snapshot has changed; `released`, known after the commit, are the snapshots to which
    none refers any more.
    """

    def __init__(self, connection: sqlite3.Connection, number: int, mark: int) -> None:
        self.connection = connection
        self.number = number
        self.references: Counter[str] = Counter()
        self.mark = mark
        self.released: frozenset[str] = frozenset()

    def put_group(self, row: GroupRow, replaced: tuple[int, GroupRow] | None) -> None:
        """Brings the group's row into force in place of the one before."""
        if replaced is not None:
            self._end(GROUPS, *replaced)
        self.connection.execute(GROUPS.insert, sealed(row))

    def put_members(self, key: str, members: Mapping[int, Member], size: int) -> None:
        """Brings rollouts of a group into force, by position; those from `size` on go. Equal ones stay as they are."""
        present = {row.position: (number, row) for number, row in members_of(self.connection, key)}
        for position, replaced in present.items():
            if position >= size:
                self._end(MEMBERS, *replaced)
        for position, member in members.items():
            row = _member_row(key, position, self.number, member)
            if position in present:
                if self._has(*present[position], row, member.payload):
                    continue
                self._end(MEMBERS, *present[position])
            cursor = self.connection.execute(MEMBERS.insert, sealed(row))
            self.connection.execute("INSERT INTO payloads VALUES (?, ?)", (cursor.lastrowid, member.payload))
            self.references.update(member.summary.snapshots)

    def end_group(self, number: int, row: GroupRow, state: State, reason: str = "") -> None:
        """Takes a group and its rollouts out of force, and counts what has become of it."""
        rows = members_of(self.connection, row.key)
        self._end(GROUPS, number, row)
        for replaced in rows:
            self._end(MEMBERS, *replaced)
        members = [member for _, member in rows]
        sums = sum(m.tokens for m in members), sum(m.turns for m in members), sum(m.bytes for m in members)
        self.connection.execute(_TALLY, (state.value, reason, 1, len(members), *sums))

    def delete(self, table: str, condition: str, parameters: tuple[Any, ...] = ()) -> None:
        """Deletes rows for good, with what hangs on them."""
        if table == MEMBERS.name:
            query = f"SELECT snapshots FROM members WHERE {condition}"
            for (snapshots,) in self.connection.execute(query, parameters):
                self.references.subtract(json.loads(snapshots))
            members = f"(SELECT id FROM members WHERE {condition})"
            self.connection.execute(f"DELETE FROM payloads WHERE member IN {members}", parameters)
        self.connection.execute(f"DELETE FROM {table} WHERE {condition}", parameters)

    def set_until(self, table: Table[Versioned], number: int, row: Versioned, until: int | None) -> None:
        """Takes a row out of force without deleting it, or brings it back."""
        *_, seal = sealed(row._replace(until=until))
        statement = f"UPDATE {table.name} SET until = ?, seal = ? WHERE id = ?"
        self.connection.execute(statement, (until, seal, number))

    def _has(self, number: int, present: MemberRow, row: MemberRow, payload: bytes) -> bool:
        """Whether the present row and its payload are what is to come."""
        if present._replace(since=row.since) != row:
            return False
        query = "SELECT bytes FROM payloads WHERE member = ?"
        return bool(self.connection.execute(query, (number,)).fetchone() == (payload,))

    def _end(self, table: Table[Versioned], number: int, row: Versioned) -> None:
        if row.since > self.mark:
            self.delete(table.name, "id = ?", (number,))
        else:
            self.set_until(table, number, row, self.number)


def _member_row(key: str, position: int, since: int, member: Member) -> MemberRow:
    summary = member.summary
    return MemberRow(
        key,
        position,
        since,
        None,
        checksum_of(member.payload),
        len(member.payload),
        summary.tokens,
        summary.turns,
        summary.oldest_version,
        summary.newest_version,
        summary.status,
        json.dumps(summary.snapshots),
    )
