"""Mounts a directory inside the namespaces of a running sandbox, from outside, with root's rights.

A sandbox of an unprivileged user cannot be given its workspace by path where a directory above is closed to
that user. Root takes a copy of the mount by descriptor and moves it into place; the paths stay closed.
Linux 5.12; the calls have no wrapper in the C library yet.
"""

import ctypes
import os
import threading
from pathlib import Path

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def can_mount() -> bool:
    """Whether this process may copy mounts, which takes CAP_SYS_ADMIN and a kernel that can."""
    try:
        os.close(_copied("/"))
    except OSError:
        return False
    return True


def mount_inside(directory: Path, pid: int, target: str) -> None:
    """Mounts the directory at `target` in the mount namespace of the process. Blocks; raises OSError."""
    mounted = _Mounted(directory, pid, target)
    # A thread that has entered the other namespace is of no use for anything else: it ends there.
    thread = threading.Thread(target=mounted.run, name="midstream-mount")
    thread.start()
    thread.join()
    if mounted.error is not None:
        raise mounted.error


class _Mounted:
    def __init__(self, directory: Path, pid: int, target: str) -> None:
        self._directory, self._pid, self._target = directory, pid, target
        self.error: OSError | None = None

    def run(self) -> None:
        fds: list[int] = []
        try:
            fds.append(_copied(self._directory))
            fds.append(os.open(f"/proc/{self._pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
            tree, namespace = fds
            # The other threads of this process keep their root and working directory.
            _checked(_libc.unshare(_CLONE_FS), "unshare")
            _checked(_libc.setns(namespace, _CLONE_NEWNS), "setns")
            empty, to = ctypes.c_char_p(b""), ctypes.c_char_p(os.fsencode(self._target))
            moved = _libc.syscall(_SYS_MOVE_MOUNT, tree, empty, _AT_FDCWD, to, _MOVE_MOUNT_F_EMPTY_PATH)
            _checked(moved, "move_mount")
        except OSError as error:
            self.error = error
        finally:
            for fd in fds:
                os.close(fd)


def _copied(directory: Path | str) -> int:
    """A copy of the mount of the directory, which is nowhere in the tree yet; without setuid and devices."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    empty = ctypes.c_char_p(b"")
    try:
        flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH | _AT_RECURSIVE
        tree = _checked(_libc.syscall(_SYS_OPEN_TREE, fd, empty, flags), "open_tree")
    finally:
        os.close(fd)
    try:
        attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        flags = _AT_EMPTY_PATH | _AT_RECURSIVE
        _checked(_libc.syscall(_SYS_MOUNT_SETATTR, tree, empty, flags, attributes, size), "mount_setattr")
    except OSError:
        os.close(tree)
        raise
    return tree


def _checked(result: int, step: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{step}: {os.strerror(error)}")
    return result
