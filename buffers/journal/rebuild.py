"""Saves what is sound in a damaged journal: copies it into a new file, which takes the place of the old one.

A damaged page costs the rows on it. Indexes are made anew. The first page, which says how to read all others, is the
same in every journal but for what counts pages, so it is taken from the new one.
"""

import itertools
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from midstream.buffers.journal.database import FAULTS, PAGE_BYTES, Database, told
from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.journal.lock import cannot_write
from midstream.buffers.journal.reading import payload_of
from midstream.buffers.journal.schema import CHECKPOINTS, GROUPS, MEMBERS, MemberRow, Row, Table, sealed
from midstream.envs.store.packs import sync_directory

_SUFFIX = ".rebuilt"
DAMAGED_SUFFIX = ".damaged"
# Row numbers are given one by one, so none is above this.
_LAST = 1 << 40
# After so many rows that cannot be read, one by one, the whole table is lost.
_MOST_LOOKS = 20_000
_COUNTER_AT = 24
# Rollouts that are copied in one transaction.
_AT_ONCE = 100


def rebuild(path: Path) -> None:
    """Puts a new file in the place of the journal at `path`, which nobody has open; the old one stays beside it.

    Raises JournalError.
    """
    fresh = path.with_name(path.name + _SUFFIX)
    _remove(fresh)
    try:
        _make(fresh, path)
        _check_closed(path)
        # Whoever knows more about it than this may still read it.
        aside = path.with_name(path.name + DAMAGED_SUFFIX)
        aside.unlink(missing_ok=True)
        os.link(path, aside)
        fresh.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise cannot_write(path.parent, error) from error
    finally:
        _remove(fresh)


def _make(fresh: Path, path: Path) -> None:
    Database(fresh).close()
    try:
        _replace_first_page(path, fresh)
        with closing(_opened(path)) as old:
            new = Database(fresh)
            try:
                _copy(old, new)
                # To close it copies the log as well, but does not say where that fails.
                new.settle()
            finally:
                new.close()
    except FAULTS as error:
        fault = told(path, error)
        raise (_hopeless(path, error) if isinstance(fault, JournalDamaged) else fault) from error
    _check_closed(fresh)


def _check_closed(path: Path) -> None:
    """Raises JournalError where some of what was written is not in the file, but in a log beside it."""
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        raise _hopeless(log, "it cannot be copied into the file")


def _hopeless(path: Path, reason: object) -> JournalError:
    return JournalError(
        f"nothing in {path} can be saved ({reason}): move it away or set another run_dir to begin with an empty buffer"
    )


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    # It is copied into the file, so that none is left that would be taken for the new file's.
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return connection


def _replace_first_page(path: Path, fresh: Path) -> None:
    with fresh.open("rb") as file:
        page = bytearray(file.read(PAGE_BYTES))
    # Unlike the copy of it further on, so that the number of pages is taken from the size of the file.
    page[_COUNTER_AT] ^= 0xFF
    with path.open("r+b") as file:
        file.write(page)
        # A file that was cut off has at least the pages at which tables begin.
        file.truncate(max(path.stat().st_size, fresh.stat().st_size))
        file.flush()
        os.fsync(file.fileno())


def _copy(old: sqlite3.Connection, new: Database) -> None:
    members = _sound(old, MEMBERS)
    # Not in one transaction, for which the log would need as much space as the file.
    while some := list(itertools.islice(members, _AT_ONCE)):
        with new.writing() as connection:
            for number, member in some:
                cursor = connection.execute(_or_ignore(MEMBERS), sealed(member))
                payload = _payload(old, number, member)
                if cursor.rowcount == 1 and payload is not None:
                    connection.execute("INSERT INTO payloads VALUES (?, ?)", (cursor.lastrowid, payload))
    with new.writing(durable=True) as connection:
        for _, group in _sound(old, GROUPS):
            connection.execute(_or_ignore(GROUPS), sealed(group))
        for table in CHECKPOINTS:
            for _, checkpoint in _sound(old, table):
                for copy in CHECKPOINTS:
                    connection.execute(_or_ignore(copy), sealed(checkpoint))
        statement = "INSERT OR IGNORE INTO tallies VALUES (?, ?, ?, ?, ?, ?, ?)"
        connection.executemany(statement, _tallies(old))


def _tallies(old: sqlite3.Connection) -> list[tuple[object, ...]]:
    try:
        return old.execute("SELECT * FROM tallies").fetchall()
    except FAULTS:
        return []  # the next roll-back restores these counts


def _sound(connection: sqlite3.Connection, table: Table[Row]) -> Iterator[tuple[int, Row]]:
    """The rows that can be read and match their seal."""
    query = f"{table.select} NOT INDEXED WHERE id BETWEEN ? AND ?"
    ranges, failed = [(0, _LAST)], 0
    while ranges and failed < _MOST_LOOKS:
        low, high = ranges.pop()
        try:
            found = connection.execute(query, (low, high)).fetchall()
        except FAULTS:
            failed += 1
            if low < high:
                middle = (low + high) // 2
                ranges += [(middle + 1, high), (low, middle)]
            continue
        for values in found:
            try:
                yield table.parse(values)
            except JournalDamaged:
                continue


def _payload(connection: sqlite3.Connection, number: int, row: MemberRow) -> bytes | None:
    try:
        return payload_of(connection, number, row)
    except (*FAULTS, JournalDamaged):
        return None


def _or_ignore(table: Table[Row]) -> str:
    # Where pages point to each other wrongly, a row may be met twice.
    return table.insert.replace("INSERT", "INSERT OR IGNORE", 1)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
