"""The tables of a journal, their rows, and the seals by which a damaged row is told.

Rows are versioned. Each transaction has a number, and a row is in force from transaction `since` until
transaction `until`, or to this day where that is NULL. A checkpoint is the number of the last transaction before
it; what was in force then is kept as long as the checkpoint, and all else goes as soon as it is out of force.
"""

import zlib
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

from midstream.buffers.journal.errors import JournalDamaged

FORMAT = 2
_SEAL_BYTES = 8

_SCHEMA = """CREATE TABLE groups (
    id INTEGER PRIMARY KEY, key TEXT, since INTEGER, until INTEGER, state TEXT, step INTEGER, place INTEGER,
    size INTEGER, begun_s REAL, at_s REAL, seal BLOB
);
CREATE UNIQUE INDEX groups_in_force ON groups (key) WHERE until IS NULL;
CREATE INDEX groups_by_state ON groups (state, place) WHERE until IS NULL;
CREATE INDEX groups_ended ON groups (until) WHERE until IS NOT NULL;
CREATE TABLE members (
    id INTEGER PRIMARY KEY, key TEXT, position INTEGER, since INTEGER, until INTEGER, checksum INTEGER, bytes INTEGER,
    tokens INTEGER, turns INTEGER, oldest INTEGER, newest INTEGER, status TEXT, snapshots TEXT, seal BLOB
);
CREATE UNIQUE INDEX members_in_force ON members (key, position) WHERE until IS NULL;
CREATE INDEX members_ended ON members (until) WHERE until IS NOT NULL;
CREATE TABLE payloads (member INTEGER PRIMARY KEY, bytes BLOB);
CREATE TABLE tallies (
    state TEXT, reason TEXT, groups INTEGER, rollouts INTEGER, tokens INTEGER, turns INTEGER, bytes INTEGER,
    PRIMARY KEY (state, reason)
) WITHOUT ROWID;
CREATE TABLE checkpoints (id INTEGER PRIMARY KEY, mark INTEGER, tallies TEXT, note TEXT, seal BLOB);
CREATE TABLE checkpoints_again (id INTEGER PRIMARY KEY, mark INTEGER, tallies TEXT, note TEXT, seal BLOB)"""
SCHEMA = _SCHEMA.split(";\n")


class GroupRow(NamedTuple):
    """A group's state. `step` is the training step that it was handed to, `place` its place in the order."""

    key: str
    since: int
    until: int | None
    state: str
    step: int | None
    place: int
    size: int
    begun_s: float
    at_s: float


class MemberRow(NamedTuple):
    """A rollout's summary, its payload's checksum and size. `snapshots` is a JSON list of ids."""

    key: str
    position: int
    since: int
    until: int | None
    checksum: int
    bytes: int
    tokens: int
    turns: int
    oldest: int | None
    newest: int | None
    status: str
    snapshots: str


class CheckpointRow(NamedTuple):
    """`tallies` is a JSON list of the rows of that table, as they were; `note` is the caller's."""

    id: int
    mark: int
    tallies: str
    note: str


AnyRow = GroupRow | MemberRow | CheckpointRow
Row = TypeVar("Row", bound=AnyRow)
Versioned = TypeVar("Versioned", GroupRow, MemberRow)


class Table(Generic[Row]):
    """A table's name, the kind of its rows, and the statements that all use. Rows are read with their seal last."""

    def __init__(self, name: str, row: Callable[..., Row], fields: tuple[str, ...]) -> None:
        self.name = name
        self._row = row
        columns = (*fields, "seal")
        self.insert = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        self.select = f"SELECT {', '.join((*columns, 'id'))} FROM {name}"

    def parse(self, values: tuple[Any, ...]) -> tuple[int, Row]:
        """The number and the row of what `select` gave. Raises JournalDamaged where that was not stored."""
        row = self._row(*values[:-2])
        if sealed(row)[-1] != values[-2]:
            raise JournalDamaged(f"row {values[-1]} of the table {self.name} does not match its seal")
        return values[-1], row


GROUPS = Table("groups", GroupRow, GroupRow._fields)
MEMBERS = Table("members", MemberRow, MemberRow._fields)
# Twice, in different pages of the file: without its checkpoints a journal is of no use.
CHECKPOINTS = tuple(
    Table(name, CheckpointRow, CheckpointRow._fields) for name in ("checkpoints", "checkpoints_again")
)


def sealed(row: AnyRow) -> tuple[Any, ...]:
    """The row with its seal, as it is stored."""
    return (
        *row,
        blake2b(repr(tuple(row)).encode("utf-8", "surrogatepass"), digest_size=_SEAL_BYTES).digest(),
    )


def checksum_of(payload: bytes) -> int:
    """Tells damage, at a third of the time that a hash takes: equal payloads are told by comparing them."""
    return zlib.crc32(payload)
