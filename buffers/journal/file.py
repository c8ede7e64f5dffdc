"""A journal's directory, held open by one process: its lock, its database, and what is known of it by heart."""

import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from midstream.buffers.journal import database
from midstream.buffers.journal.change import Change
from midstream.buffers.journal.database import Database
from midstream.buffers.journal.errors import JournalDamaged, JournalError
from midstream.buffers.journal.lock import DirectoryLock, cannot_write, is_same
from midstream.buffers.journal.reading import all_rows, last_mark, references_of
from midstream.buffers.journal.rebuild import rebuild
from midstream.buffers.journal.schema import GROUPS
from midstream.envs.store.packs import sync_directory

_logger = logging.getLogger(__name__)


@dataclass
class _Known:
    """The last transaction's number, the last checkpoint's mark, the last place, and rows by snapshot."""

    number: int
    mark: int
    place: int
    references: Counter[str]


class JournalFile:
    """Threads may share it; each transaction or look has it alone."""

    def __init__(self, directory: Path) -> None:
        """Opens or creates it, without what is damaged. Raises JournalError."""
        try:
            _make(directory)
        except OSError as error:
            raise cannot_write(directory, error) from error
        self.path = directory / database.NAME
        self._pid = os.getpid()
        self._thread = threading.RLock()
        self._lock = DirectoryLock(directory)
        try:
            self._open()
        except BaseException:
            if hasattr(self, "_database"):
                self._database.close()
            self._lock.close()
            raise

    def _open(self) -> None:
        try:
            self._database = Database(self.path)
            self._learn()
        except JournalDamaged as damage:
            self.rebuild(damage)

    def rebuild(self, damage: JournalDamaged) -> None:
        """Goes on with a new file that has all rows of this one that are sound."""
        _logger.warning("%s; what is sound in it is copied into a new file now", damage)
        with self._thread:
            if hasattr(self, "_database"):
                self._database.close()
            rebuild(self.path)
            self._database = Database(self.path)
            self._learn()

    def _learn(self) -> None:
        with self._database.reading() as connection:
            groups = [row for _, row in all_rows(connection, GROUPS)]
            mark, references, newest = last_mark(connection), references_of(connection), 0
            for table in ("groups", "members"):
                query = f"SELECT max(max(since), coalesce(max(until), 0)) FROM {table}"
                newest = max(newest, connection.execute(query).fetchone()[0] or 0)
        self._known = _Known(
            max(newest, mark), mark, max((row.place for row in groups), default=0), references
        )
        self._is_known = True
        self._opened_as = self.path.stat()

    @property
    def references(self) -> frozenset[str]:
        """The ids of the snapshots that rows refer to."""
        with self._thread:
            self._check_open()
            return frozenset(self._known.references)

    def refers_to(self, snapshot_id: str) -> bool:
        """Whether a row refers to the snapshot."""
        with self._thread:
            self._check_open()
            return snapshot_id in self._known.references

    def check_there(self) -> None:
        """Raise JournalError where what is open is not what lies in the directory any more."""
        with self._thread:
            self._check_open()
            if not (self._lock.is_there() and is_same(self.path, self._opened_as)):
                raise JournalError(
                    f"{self.path} was removed or replaced while this job had it open: nothing that waits would outlast "
                    "a restart, and another job could start beside this one. Start again from the last checkpoint, "
                    "with another run_dir, or with the folder put back"
                )

    def next_place(self) -> int:
        """A place behind all others. A transaction that fails leaves a gap, which does no harm."""
        with self._thread:
            self._known.place += 1
            return self._known.place

    @contextmanager
    def changing(self, *, durable: bool = False) -> Iterator[Change]:
        """A transaction: all of it happens, or nothing. `durable` outlasts a power cut."""
        with self._thread:
            self._check_open()
            known = self._known
            # Until all of it is noted here as well: whatever interrupts it, the file may have the change or not.
            self._is_known = False
            with self._database.writing(durable=durable) as connection:
                change = Change(connection, known.number + 1, known.mark)
                yield change
            known.number, known.mark = change.number, change.mark
            change.released = _count(known.references, change.references)
            self._is_known = True

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for a look."""
        with self._thread:
            self._check_open()
            with self._database.reading() as connection:
                yield connection

    def settle(self) -> None:
        """Puts all that was written in its final place, and makes the file smaller where much of it is free."""
        with self._thread:
            self._database.settle()

    def close(self) -> None:
        """Lets go of the directory; fine where that is done already."""
        with self._thread:
            # A child's copy of the connection could touch files that the parent uses.
            if os.getpid() == self._pid:
                self._database.close()
            self._lock.close()
            self._pid = -1

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise JournalError(
                f"the journal {self.path} is closed, or was opened by another process: open it in the process that"
                " uses it"
            )
        if not self._is_known:
            self._learn()


def _make(directory: Path) -> None:
    """The directory, so that it outlasts a power cut."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _count(references: Counter[str], changes: Counter[str]) -> frozenset[str]:
    """Adds the changes; returns the ids to which nothing refers any more."""
    released = set()
    for snapshot, change in changes.items():
        references[snapshot] += change
        if references[snapshot] <= 0:
            del references[snapshot]
            if change < 0:
                released.add(snapshot)
    return frozenset(released)
