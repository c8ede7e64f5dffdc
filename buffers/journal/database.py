"""The file of a journal: SQLite in write-ahead mode, its transactions, and what its faults mean.

A commit outlasts the death of the process at any moment; a durable one outlasts a power cut as well, and so does
all that was committed before it.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from midstream.buffers.journal.copying import LogCopier, copying
from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.journal.schema import FORMAT, SCHEMA
from midstream.envs.store.index import transaction
from midstream.envs.store.packs import sync_directory
from midstream.envs.store.unchanged import read_unchanged

Seen = TypeVar("Seen")

NAME = "journal.sqlite"
# Between what suits payloads of some hundred kilobytes and what suits a change of state, which writes some pages whole.
PAGE_BYTES = 16 * 1024
# The change by which the log grows to this copies it into the file, where that was not done beside it in time.
_LOG_BYTES = 64 << 20
_CACHE_BYTES = 8 << 20
BUSY_TIMEOUT_S = 60.0
# Free pages are given back where they are more than this share of the file, so much at a time.
_FREE_SHARE = 0.5
_GIVEN_BACK_BYTES = 64 << 20
# UnicodeDecodeError: the module cannot decode what SQLite says of a damaged schema.
FAULTS = (sqlite3.Error, UnicodeDecodeError)
_NOT_WRITTEN = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


class Database:
    """A journal's file, open for writing. Not for two threads at once."""

    def __init__(self, path: Path) -> None:
        """Opens or creates it. Raises JournalError, JournalDamaged where it is not readable at all."""
        self.path = path
        self._connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            with self.reading() as connection:
                _prepare(connection, path)
                self._copier = LogCopier(path, FAULTS)
        except BaseException:
            self._connection.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection; what fails in the block is told as JournalError or JournalDamaged."""
        try:
            yield self._connection
        except sqlite3.ProgrammingError:
            raise  # ours
        except FAULTS as error:
            raise told(self.path, error) from error

    @contextmanager
    def writing(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it happens, or nothing."""
        with self.reading() as connection:
            if durable:
                connection.execute("PRAGMA synchronous = FULL")
            try:
                with transaction(connection):
                    yield connection
                self._copier.committed()
            finally:
                if durable:
                    connection.execute("PRAGMA synchronous = NORMAL")

    def settle(self) -> None:
        """Makes the file smaller where much of it is free, and copies the log into it, which is empty then.

        Damage to a log costs all that comes after it; damage to the file costs what is on the page.
        """
        with copying, self.reading() as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (free,) = connection.execute("PRAGMA freelist_count").fetchone()
            if free > pages * _FREE_SHARE:
                count = min(free - int(pages * _FREE_SHARE), _GIVEN_BACK_BYTES // PAGE_BYTES)
                # A page for each step of the statement; `execute` takes but one.
                connection.executescript(f"PRAGMA incremental_vacuum({count})")
            # Whoever reads at this moment keeps the log from being emptied: the next one to settle will do it.
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")

    def close(self) -> None:
        """Copies the log into the file and closes it; fine where that is done already."""
        self._copier.close()
        self._connection.close()


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    made = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not made:
        check_format(connection, path)
    else:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA temp_store = MEMORY")
    # Where it is on, as Debian builds it, every payload is written a second time when it goes: as zeros.
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA cache_size = {-_CACHE_BYTES // 1024}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_BYTES // PAGE_BYTES}")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    if made:
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute(f"PRAGMA application_id = {FORMAT}")
        connection.execute("COMMIT")
        sync_directory(path.parent)


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises JournalError unless this version of midstream reads the format; JournalDamaged where it is unclear."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (again,) = connection.execute("PRAGMA application_id").fetchone()
    if found == again != FORMAT:
        raise JournalError(
            f"{path} has format {found}, this version of midstream reads {FORMAT}: go on with the version that wrote"
            " it, or set another run_dir to begin with an empty buffer"
        )
    made = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    if found != again or sorted(made) != sorted((statement,) for statement in SCHEMA):
        raise _damaged(path, "its first page is not as midstream writes it")


def read_beside(path: Path, look: Callable[[sqlite3.Connection], Seen]) -> Seen:
    """What ``look`` makes of the file as it is at this moment, beside a job that writes it; nothing is changed.

    Raises JournalError, JournalDamaged.
    """

    def checked(connection: sqlite3.Connection) -> Seen:
        check_format(connection, path)
        return look(connection)

    try:
        return read_unchanged(path, checked, timeout_s=BUSY_TIMEOUT_S)
    except FileNotFoundError:
        raise JournalError(f"{path} does not exist: {path.parent} is not the buffer of a run") from None
    except OSError as error:
        raise JournalError(
            f"cannot read {path} ({error.strerror}): look as the user of the job, or mend access"
        ) from error
    except FAULTS as error:
        raise told(path, error) from error


def told(path: Path, error: Exception) -> JournalError:
    """What one of FAULTS means here."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # A damaged file may say of itself that it is not to be written.
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    if code in _NOT_WRITTEN or (code == sqlite3.SQLITE_READONLY and not writable):
        # For the index of the log SQLite says no more than that it could not be written.
        full = code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and not _free_bytes(path))
        reason = "No space left on device" if full else str(error)
        return JournalError(
            f"cannot use {path}: {reason}; nothing of this change was written: free space or mend access, or set"
            " another run_dir"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
        return JournalError(
            f"{path} is locked by another program for more than {BUSY_TIMEOUT_S:g} s: stop it"
        )
    return _damaged(path, str(error))


def _free_bytes(path: Path) -> int:
    there = os.statvfs(path.parent)
    return there.f_bavail * there.f_frsize


def _damaged(path: Path, reason: str) -> JournalDamaged:
    return JournalDamaged(
        f"{path} is damaged ({reason}): stop the job and start it again from its last checkpoint, which costs the"
        " damaged entries only"
    )
