"""One small file that several processes and hosts read and change, each change whole or not at all.

A change holds an exclusive `flock` on the file. Linux passes that lock on to the server on NFS (version 4, or 3
with its lock service) and on Lustre mounted with `flock`, and the client then reads the file anew; a mount
with `nolock` or `local_lock`, or Lustre's `localflock`, excludes only processes of one host, and cannot be told
from here. The kernel gives the lock back when its holder is killed.

The content is kept twice, each copy with a sequence number and a checksum. A change writes the older copy, so
that a kill in the middle of the write leaves the newer one as it was.
"""

import errno
import fcntl
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream.envs.errors import EnvironmentFailure

# Holders keep the lock for less than a millisecond, a slow file server for some; a minute means a stuck one.
LOCK_TIMEOUT_S = 60.0
LOCK_POLL_S = 0.001
LOCK_LONGEST_POLL_S = 0.05
# Where the second copy begins: far behind the end of any first one.
COPY_BYTES = 1 << 20

_HEADER = struct.Struct("<QII")


class Ledger:
    """The file, made where it is absent. Its methods block; threads of one process exclude each other, too.

    Raises EnvironmentFailure where the file cannot be used, naming it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFailure(f"shared_path={str(path.parent)!r}: {error.strerror}") from error

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """The content, to be changed in place while nobody else sees it; kept unless the block raises."""
        try:
            # Opened each time: a file server's client then asks for the file's state anew.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._lock(fd)
            try:
                number, content = _newest(fd)
            except OSError as error:
                raise self._unusable(error) from error
            before = json.dumps(content)
            yield content
            after = json.dumps(content)
            if after != before:
                try:
                    _write(fd, number + 1, after.encode())
                except OSError as error:
                    raise self._unusable(error) from error
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        poll_s = LOCK_POLL_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._unusable(error) from error
            else:
                return
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"{self.path} has been locked by another process for {LOCK_TIMEOUT_S:g} s: find it with "
                    "`lslocks` on the hosts that share the path, and end it"
                )
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LOCK_LONGEST_POLL_S)

    def _unusable(self, error: OSError) -> EnvironmentFailure:
        message = f"cannot count sandboxes in {self.path}: {error.strerror}"
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            message += "; its file system has no locks: name another shared_path, or mount it with them"
        return EnvironmentFailure(message)


def _newest(fd: int) -> tuple[int, dict[str, Any]]:
    """The number and content of the newer whole copy; 0 and nothing for a new file."""
    return max((_read(fd, 0), _read(fd, COPY_BYTES)), key=lambda copy: copy[0])


def _read(fd: int, offset: int) -> tuple[int, dict[str, Any]]:
    header = os.pread(fd, _HEADER.size, offset)
    if len(header) < _HEADER.size:
        return 0, {}
    number, length, checksum = _HEADER.unpack(header)
    content = os.pread(fd, length, offset + _HEADER.size) if length <= COPY_BYTES else b""
    if len(content) != length or zlib.crc32(content, number & 0xFFFFFFFF) != checksum or not number:
        return 0, {}
    return number, json.loads(content)


def _write(fd: int, number: int, content: bytes) -> None:
    header = _HEADER.pack(number, len(content), zlib.crc32(content, number & 0xFFFFFFFF))
    whole = header + content
    written = os.pwrite(fd, whole, COPY_BYTES * (number % 2))
    if written != len(whole):
        raise OSError(errno.ENOSPC, "the file system is full")
