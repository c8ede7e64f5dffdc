"""Reads and writes files of a workspace from outside, and never follows a link out of it.

An agent may have put a link, a FIFO or a device where a file is expected, and may swap one for the other at any
moment: each part of a path is opened relative to the one before, without following links.
"""

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


def read_beneath(root: int, path: str, max_bytes: int) -> bytes:
    """The content of a regular file below the directory `root`, an open descriptor.

    Raises FileNotFoundError; ValueError for a path that leaves the workspace, something that is no regular
    file, or one of more than `max_bytes`.
    """
    *folders, name = _parts(path)
    with _opened(root, folders, create=False) as folder:
        try:
            fd = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise ValueError(f"{path!r} is a link or a socket, not a file") from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise ValueError(f"{path!r} is not a regular file")
            content = bytearray()
            while len(content) <= max_bytes and (chunk := os.read(fd, min(1 << 20, max_bytes + 1))):
                content += chunk
        finally:
            os.close(fd)
    if len(content) > max_bytes:
        raise ValueError(f"{path!r} has more than {max_bytes} bytes: allow more, or read a part of it")
    return bytes(content)


def write_beneath(root: int, path: str, content: bytes, owner: tuple[int, int] | None = None) -> None:
    """Replaces a file below the directory `root`, whole or not at all, and makes the folders above it.

    A file that is replaced keeps its mode. What is made belongs to `owner`, a uid and a gid, and is made with no
    more rights than theirs. Raises ValueError for a path that leaves the workspace, OSError where something
    else is in the way.
    """
    *folders, name = _parts(path)
    with _acting_as(owner), _opened(root, folders, create=True) as folder:
        temporary = f".{secrets.token_hex(8)}.tmp"
        fd = os.open(temporary, _NEW_FILE, 0o644, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                if (mode := _mode_of(name, folder)) is not None:
                    os.fchmod(fd, mode)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise


def _mode_of(name: str, folder: int) -> int | None:
    """The permissions of a regular file; None where there is none."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(mode) & 0o777 if stat.S_ISREG(mode) else None


def _parts(path: str) -> list[str]:
    parts = [part for part in PurePosixPath(path).parts if part != "."]
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} does not name a file of the workspace: give a relative path without '..'")
    return parts


@contextmanager
def _opened(root: int, folders: list[str], *, create: bool) -> Iterator[int]:
    current = os.dup(root)
    try:
        for folder in folders:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o755, dir_fd=current)
            try:
                following = os.open(folder, _DIRECTORY, dir_fd=current)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                raise ValueError(f"{folder!r} is no folder of the workspace: {error.strerror}") from error
            os.close(current)
            current = following
        yield current
    finally:
        os.close(current)


@contextmanager
def _acting_as(owner: tuple[int, int] | None) -> Iterator[None]:
    """Takes on a user's identity towards files, for this thread alone, which glibc's other calls do not."""
    if owner is None:
        yield
        return
    gid, uid = _libc.setfsgid(owner[1]), _libc.setfsuid(owner[0])
    try:
        yield
    finally:
        _libc.setfsuid(uid)
        _libc.setfsgid(gid)
