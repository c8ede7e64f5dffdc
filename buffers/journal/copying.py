"""Copies the log of a journal into its file while the job goes on, so that no change has to wait for that.

The log is begun anew once all of it is in the file. Without this the change by which it has grown too long copies
all of it, for which it has to wait for the disk.
"""

import os
import sqlite3
import threading
from pathlib import Path

# After so many transactions, each of some hundred kilobytes where it brings a record. Copied more often, the thread
# slows down those that write; less often, it is in their way for longer.
_EVERY = 32
# Held by whoever copies. A fork waits: its child would find the locks within SQLite held for good.
copying = threading.RLock()


class LogCopier:
    """A thread, with a connection of its own."""

    def __init__(self, path: Path, faults: tuple[type[Exception], ...]) -> None:
        """`path` is of a file that has its tables. Faults of SQLite are left to whoever writes, who meets them too."""
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA busy_timeout = 0")
        self._wake = threading.Event()
        self._is_closed = False
        self._count = 0
        self._thread = threading.Thread(
            target=self._copy, args=(faults,), name="midstream-journal", daemon=True
        )
        self._thread.start()

    def committed(self) -> None:
        """Says that there is one more transaction."""
        self._count += 1
        if self._count % _EVERY == 0:
            self._wake.set()

    def close(self) -> None:
        """Waits for the thread to end; fine where it has."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._connection.close()

    def _copy(self, faults: tuple[type[Exception], ...]) -> None:
        while self._wake.wait() and not self._is_closed:
            self._wake.clear()
            try:
                with copying:
                    self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except faults:
                continue


os.register_at_fork(before=copying.acquire, after_in_parent=copying.release, after_in_child=copying.release)
