"""Where the layers of one backend lie, and how what a killed process left there is found.

    <root>/<instance>.lock                  held as long as the process of the instance lives
    <root>/<instance>/<n>/layer/workspace   a closed layer: what one turn changed, or a whole tree
    <root>/<instance>/<n>/upper/workspace   what a sandbox has written since its last turn was closed
    <root>/<instance>/<n>/work              the kernel's, beside it

Numbers are never used again, and are all that a sandbox could read of a place in its list of mounts.
"""

import fcntl
import itertools
import os
import secrets
import shutil
import struct
from collections import deque
from contextlib import suppress
from pathlib import Path

from midstream.envs.sandboxes.overlay.mounts import LAYER, UPPER, WORK, WORKSPACE
from midstream.envs.store.removal import remove_tree

# As many as may be needed before the background gets round to making more.
PREPARED = 16
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_FS_TOPDIR_FL = 0x00020000


class LayerPlaces:
    """The directory of one instance."""

    def __init__(self, root: Path) -> None:
        """Raises OSError where it cannot be made."""
        root.mkdir(parents=True, exist_ok=True)
        name, self._lock = _locked_name(root)
        self.path = root / name
        self._names = itertools.count(1)
        self._prepared: deque[str] = deque()
        self.path.mkdir(mode=0o700)
        # A folder above that hands its group down would hand one that no namespace of ours maps.
        os.chown(self.path, -1, os.getegid())
        self.path.chmod(0o700)
        _spread(self.path)

    def prepare(self) -> None:
        """Makes places that `new_live` then finds. Raises OSError."""
        while len(self._prepared) < PREPARED:
            self._prepared.append(self._made_live())

    def new_live(self) -> str:
        """The name of a place that a mount can write to."""
        try:
            return self._prepared.popleft()
        except IndexError:
            return self._made_live()

    def new_layer(self) -> str:
        """The name of a place for a layer, whose `workspace` is still to be made."""
        name = str(next(self._names))
        (self.path / name / LAYER).mkdir(parents=True)
        return name

    def new_blank(self, top: str) -> str:
        """The name of a layer that changes nothing above `top`: its root alone, as it is there."""
        name = self.new_layer()
        self.workspace(name).mkdir()
        shutil.copystat(self.workspace(top), self.workspace(name))
        return name

    def new_work(self, live: str) -> str:
        """Another work folder for a place whose last one a mount has used; returns its name."""
        name = f"{WORK}{next(self._names)}"
        (self.path / live / name).mkdir()
        return name

    def workspace(self, layer: str) -> Path:
        """The tree of a closed layer."""
        return self.path / layer / LAYER / WORKSPACE

    def written(self, live: str) -> Path:
        """What was written to a live place; missing where nothing was."""
        return self.path / live / UPPER / WORKSPACE

    def close_layer(self, live: str) -> None:
        """Makes what was written a layer, which nothing writes to any more, even while it is still mounted."""
        self.written(live).rename(self.workspace(live))

    def reopen_layer(self, live: str) -> None:
        """Takes `close_layer` back."""
        self.workspace(live).rename(self.written(live))

    def strip(self, layer: str) -> None:
        """Removes from the place of a closed layer what only its mount needed. Raises OSError."""
        for path in (self.path / layer).iterdir():
            if path.name == LAYER:
                continue
            try:
                _remove_emptied(path)
            except OSError:
                remove_tree(path)

    def remove(self, name: str) -> None:
        """Removes a place of either kind; one that is gone is fine. Raises OSError where something stays."""
        remove_tree(self.path / name)

    def close(self) -> None:
        """Removes all that is there. Raises OSError where something stays."""
        remove_tree(self.path)
        self.path.with_suffix(".lock").unlink(missing_ok=True)
        os.close(self._lock)

    def _made_live(self) -> str:
        name = self.new_layer()
        (self.path / name / UPPER).mkdir()
        (self.path / name / WORK).mkdir()
        return name


def _remove_emptied(directory: Path) -> None:
    """Removes an upper folder whose tree is a layer now, or a work folder in which the kernel has left next to nothing.

    Raises OSError where there is more in it.
    """
    inner = directory / "work"
    if inner.exists():
        (inner / "incompat" / "volatile" / "dirty").unlink()
        for left in (inner / "incompat" / "volatile", inner / "incompat", inner):
            left.rmdir()
    directory.rmdir()


def remove_abandoned(root: Path) -> None:
    """Removes this user's instances under a root whose processes are gone. Raises OSError where something stays."""
    for lock in root.glob("*.lock"):
        with suppress(FileNotFoundError):
            if lock.lstat().st_uid != os.geteuid():
                continue
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                remove_tree(lock.with_suffix(""))
                lock.unlink()
            finally:
                os.close(fd)


def _locked_name(root: Path) -> tuple[str, int]:
    """A new name and its lock, held. Whoever looks for abandoned instances may have removed it before we did."""
    while True:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        lock = root / f"{name}.lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if lock.stat().st_ino == os.fstat(fd).st_ino:
                return name, fd
        os.close(fd)


def _spread(directory: Path) -> None:
    """Asks ext4 to put each folder in here into a part of the disk of its own.

    ext4 steps over every inode of a part that was deleted in the last minute before it takes a free one, and
    each mount makes and deletes a few: after some hundreds in one part a mount takes 4 ms instead of 0.2.
    Other file systems have no such flag, and no such need.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            (flags,) = struct.unpack("i", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(4)))
            fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("i", flags | _FS_TOPDIR_FL))
    finally:
        os.close(fd)
