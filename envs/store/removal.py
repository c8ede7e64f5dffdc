"""Removes trees whatever their modes, size and depth, and follows no link doing so."""

import errno
import os
import secrets
import stat
from pathlib import Path

from midstream.envs.store.listing import open_beneath
from midstream.envs.store.records import joined, parent

# Deeper directories are first moved up, since the paths to them would grow with the square of the depth.
_MAX_DEPTH = 200
# Something that makes files as fast as they are removed keeps a directory in place.
_ATTEMPTS = 5
_DIRECTORY = os.O_PATH | os.O_DIRECTORY


def remove_tree(path: Path | str) -> None:
    """Removes a directory tree; a missing one is fine. Raises OSError where something stays."""
    try:
        fd = os.open(path, _DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_below(fd, b"")
    finally:
        os.close(fd)
    os.rmdir(path)  # noqa: PTH106


def remove_node(root_fd: int, path: bytes) -> None:
    """Removes what has this path below the directory, with all below it. Raises OSError."""
    fd = open_beneath(root_fd, parent(path), _DIRECTORY)
    name = path[path.rfind(b"/") + 1 :]
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=fd)
            return
        remove_below(root_fd, path)
        os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)


def remove_below(root_fd: int, top: bytes) -> None:
    """Removes all that is in this directory below `root_fd`. Raises OSError."""
    pending = [(top, 0)]
    attempts = 0
    while pending:
        path, depth = pending[-1]
        below = _remove_files(root_fd, path)
        if not below:
            pending.pop()
            if path == top:
                return
            if not _remove_empty(root_fd, path):
                attempts += 1
                if attempts > _ATTEMPTS:
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
                pending.append((path, depth))
        elif depth < _MAX_DEPTH:
            pending += [(joined(path, name), depth + 1) for name in below]
        else:
            for name in below:
                _move_up(root_fd, joined(path, name), top)


def _remove_files(root_fd: int, path: bytes) -> list[bytes]:
    """Removes all but the directories in a directory; returns their names."""
    fd = _opened(root_fd, path)
    directories = []
    try:
        with os.scandir(fd) as nodes:
            for node in nodes:
                if node.is_dir(follow_symlinks=False):
                    directories.append(os.fsencode(node.name))
                else:
                    os.unlink(node.name, dir_fd=fd)
    finally:
        os.close(fd)
    return directories


def _opened(root_fd: int, path: bytes) -> int:
    """The directory, after its mode lets its owner change it."""
    node = open_beneath(root_fd, path, _DIRECTORY)
    try:
        name = f"/proc/self/fd/{node}"
        mode = os.fstat(node).st_mode
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(name, stat.S_IMODE(mode) | stat.S_IRWXU)  # noqa: PTH101
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(node)


def _remove_empty(root_fd: int, path: bytes) -> bool:
    fd = open_beneath(root_fd, parent(path), _DIRECTORY)
    try:
        os.rmdir(path[path.rfind(b"/") + 1 :], dir_fd=fd)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    finally:
        os.close(fd)
    return True


def _move_up(root_fd: int, path: bytes, top: bytes) -> None:
    os.close(_opened(root_fd, path))
    source = open_beneath(root_fd, parent(path), _DIRECTORY)
    target = open_beneath(root_fd, top, _DIRECTORY)
    try:
        new_name = b"." + secrets.token_hex(8).encode("ascii")
        os.rename(path[path.rfind(b"/") + 1 :], new_name, src_dir_fd=source, dst_dir_fd=target)
    finally:
        os.close(source)
        os.close(target)
