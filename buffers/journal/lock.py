"""One job per journal: an exclusive lock, which ends with the process that holds it."""

import fcntl
import os
import re
import socket
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from midstream.buffers.journal.errors import JournalError, JournalInUse

NAME = "journal.lock"
_LABEL_BYTES = 256
# Whoever looks for a holder has the lock for an instant, which refuses no job.
_TRIES, _PAUSE_S = 10, 0.02


@dataclass(frozen=True)
class Holder:
    """The job that has a journal open: its process and its host, as that calls itself."""

    pid: int
    host: str


def holder_of(directory: Path) -> Holder | None:
    """Who has the journal in a directory open, None where nobody has. Raises JournalError where that is hidden."""
    path = directory / NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(
            f"cannot read {path} ({error.strerror}): look as the user of the job, or mend access"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        named = re.fullmatch(r"process (\d+) on (.*)", _label(fd))
        return Holder(int(named[1]), named[2]) if named else Holder(0, "unknown")
    finally:
        os.close(fd)


class DirectoryLock:
    """Held from its making until ``close``, or until the process ends in any way."""

    def __init__(self, directory: Path, name: str = NAME) -> None:
        """`name` is the file that stands for it.

        Raises JournalInUse where another job holds it, JournalError where the directory cannot be written.
        """
        path = self._path = directory / name
        self._fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(directory, error) from error
        try:
            _lock(fd)
            os.truncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = _label(fd) or "another process"
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

    def is_there(self) -> bool:
        """Whether another job would find the file that this one has locked."""
        return self._fd >= 0 and is_same(self._path, os.fstat(self._fd))

    def close(self) -> None:
        """Lets go; fine where that is done already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int) -> None:
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_PAUSE_S)


def _label(fd: int) -> str:
    return os.pread(fd, _LABEL_BYTES, 0).decode(errors="replace")


def is_same(path: Path, as_it_was: os.stat_result) -> bool:
    """Whether the file at ``path`` is still the one that it was."""
    try:
        return os.path.samestat(path.stat(), as_it_was)
    except FileNotFoundError:
        return False


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
