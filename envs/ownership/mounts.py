"""What is mounted where, and how to take it away."""

import ctypes
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
# File systems whose content only this host changes.
LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})

_MOUNTINFO = Path("/proc/self/mountinfo")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Mount:
    point: str
    file_system: str


def mounts() -> list[Mount]:
    """All mounts that this process sees, in the order in which they were made."""
    found = []
    for line in _MOUNTINFO.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        point = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), before.split(b" ")[4])
        found.append(Mount(os.fsdecode(point), os.fsdecode(after.split(b" ", 1)[0])))
    return found


def mounts_below(directory: Path) -> list[str]:
    """Where something is mounted at or below the directory, the latest first."""
    path = os.path.realpath(directory)
    points = [mount.point for mount in mounts()]
    return [point for point in reversed(points) if point == path or point.startswith(path.rstrip("/") + "/")]


def unmount(point: str) -> None:
    """Takes a mount away, from under its users where there are any; fine where it is gone. Raises OSError."""
    number = 0
    for flags in (UMOUNT_NOFOLLOW, UMOUNT_NOFOLLOW | MNT_DETACH):
        if _libc.umount2(os.fsencode(point), flags) == 0:
            return
        number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOENT):
        raise OSError(number, os.strerror(number), point)


def is_local(path: Path) -> bool:
    """Whether the path lies on a file system that no other host changes."""
    real = os.path.realpath(path)
    best = Mount("", "")
    for mount in mounts():
        below = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if below and len(mount.point) >= len(best.point):
            best = mount
    return best.file_system in LOCAL
