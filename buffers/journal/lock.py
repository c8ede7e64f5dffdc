"""One job per journal: an exclusive lock, which ends with the process that holds it."""

import fcntl
import os
import socket
import weakref
from pathlib import Path

from midstream.buffers.journal.errors import JournalError, JournalInUse

NAME = "journal.lock"
_LABEL_BYTES = 256


class DirectoryLock:
    """Held from its making until ``close``, or until the process ends in any way."""

    def __init__(self, directory: Path) -> None:
        """Raises JournalInUse where another job holds it, JournalError where the directory cannot be written."""
        path = directory / NAME
        self._fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(directory, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = os.pread(fd, _LABEL_BYTES, 0).decode(errors="replace") or "another process"
            os.close(fd)
            raise JournalInUse(
                f"{directory} is in use by {holder}: each job needs a run directory of its own; set another run_dir,"
                " or stop that job first"
            ) from None
        except OSError as error:
            os.close(fd)
            raise cannot_write(directory, error) from error
        self._fd = fd
        _held.add(self)

    def close(self) -> None:
        """Lets go; fine where that is done already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def cannot_write(directory: Path, error: OSError) -> JournalError:
    """The error for a directory in which nothing can be written."""
    return JournalError(
        f"cannot write the journal in {directory} ({error.strerror}): set run_dir to a directory that this user can"
        " write and that has space left"
    )


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A child that outlives its parent would keep the lock.
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)
