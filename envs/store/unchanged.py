"""Reads an SQLite file in write-ahead mode beside those who write it, or after they have died, and changes nothing.

A reader that opens such a file in the usual way leaves a log and an index of the log beside it.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

Seen = TypeVar("Seen")


def read_unchanged(path: Path, look: Callable[[sqlite3.Connection], Seen], *, timeout_s: float) -> Seen:
    """What `look` makes of the file as it is at one moment; it may be called again where a writer came meanwhile.

    Raises FileNotFoundError and PermissionError, and what `look` and sqlite3 raise.
    """
    while True:
        # sqlite3 says of each of these only that it is "unable to open database file".
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        if _has_log(path):
            with closing(_opened(path, "mode=ro", timeout_s)) as connection:
                connection.execute("BEGIN")
                return look(connection)
        before = _stamp(path)
        try:
            with closing(_opened(path, "immutable=1", timeout_s)) as connection:
                seen = look(connection)
        except sqlite3.Error:
            if _stamp(path) == before and not _has_log(path):
                raise
            continue
        if _stamp(path) == before and not _has_log(path):
            return seen


def _opened(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)


def _has_log(path: Path) -> bool:
    """Whether there is a log to read, or a writer, who has a log and its index; else the file is all there is."""
    log, index = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    try:
        return log.stat().st_size > 0 or index.exists()
    except FileNotFoundError:
        return False


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
