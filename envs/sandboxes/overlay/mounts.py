"""Overlay mounts for sandboxes, made from outside of them.

A mount is made in namespaces of our own, where the layers are visible and their owners are mapped, and is given
to a sandbox as a descriptor: no path of a layer exists in there. Those namespaces have no process; the
descriptors keep them, so they are gone when this process is. It works the same for root and for anybody else.

Linux 5.12 is needed: 5.11 is the first that mounts an overlay in a user namespace, and 5.12 makes a single mount
read-only by name. From 6.15 on a mount is in no tree before it is in the sandbox's, which saves an unmount.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from midstream.envs.sandboxes.isolation.bubblewrap import INSIDE
from midstream.envs.sandboxes.overlay import _native

# The one folder at the top of every layer, which is what a sandbox gets of a mount. The layer can then be closed
# by a rename of this folder, while the mount that made it still holds the folder above.
WORKSPACE = "workspace"
LAYER, UPPER, WORK = "layer", "upper", "work"
# The kernel takes 500 lower layers, and mount(2) a page of options.
MAX_LOWERS = 256
_NS_GET_USERNS = 0xB701
_COVER, _REPLACE, _SEAL, _UNSEAL = range(4)
_WALL = 0x40000000


class Mounts:
    """Makes mounts of the layers in one directory, by their names there."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError where this user may have no user namespace."""
        self.directory = directory
        self._user_ns, self._mount_ns = _new_namespaces()
        self._classic: bool | None = None

    def new_mount(self, lowers: Sequence[str], live: str, work: str = WORK) -> int:
        """A mount of the layers, the oldest first, that writes to `<live>/upper`; the caller owns the descriptor.

        `<live>/<work>` must be new: the kernel takes none that an earlier mount has used. Raises OSError, which
        names the step.
        """
        if self._classic is not None:
            return self._mounted(self._classic, lowers, live, work)
        try:
            fd = self._mounted(False, lowers, live, work)
            self._classic = False
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            fd = self._mounted(True, lowers, live, work)
            self._classic = True
        return fd

    def _mounted(self, classic: bool, lowers: Sequence[str], live: str, work: str) -> int:
        return _native.mount(
            self._user_ns,
            self._mount_ns,
            classic,
            os.fsencode(self.directory),
            ":".join(f"{name}/{LAYER}" for name in reversed(lowers)).encode(),
            f"{live}/{UPPER}".encode(),
            f"{live}/{work}".encode(),
            WORKSPACE.encode(),
            live.encode(),
        )

    def close(self) -> None:
        """Gives the namespaces back; mounts that were made stay."""
        os.close(self._user_ns)
        os.close(self._mount_ns)


class Mounted:
    """The mount point of one started sandbox. Methods raise OSError, which names the step.

    It is ESTALE where something else than `there` is at the mount point, which is then left alone.
    """

    def __init__(self, init_pid: int, target: str = INSIDE) -> None:
        self._init_pid = init_pid
        self._target = target

    def cover(self, there: os.stat_result, mount: int) -> None:
        """Puts a mount over a directory, and makes that read-only."""
        self._change(there, _COVER, mount)

    def replace(self, there: os.stat_result, mount: int) -> None:
        """Puts a mount in the place of the one there."""
        self._change(there, _REPLACE, mount)

    def seal(self, there: os.stat_result) -> bool:
        """Makes the mount read-only for good, also for whom it stays the working directory.

        Returns False, with nothing changed, where a file is open for writing or mapped to be written.
        """
        try:
            self._change(there, _SEAL)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def unseal(self, there: os.stat_result) -> None:
        """Takes `seal` back."""
        self._change(there, _UNSEAL)

    def _change(self, there: os.stat_result, how: int, mount: int = -1) -> None:
        mount_ns = os.open(f"/proc/{self._init_pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Of the user namespaces that bubblewrap nests, this is the one that may change the mounts.
            user_ns = fcntl.ioctl(mount_ns, _NS_GET_USERNS)
            try:
                at = self._target.encode(), there.st_dev, there.st_ino
                _native.change(user_ns, mount_ns, *at, how, mount)
            finally:
                os.close(user_ns)
        finally:
            os.close(mount_ns)


def can_return(pid: int, cwd: str | None, mount: int) -> bool:
    """Whether a shell that enters `cwd` by its path again will be where it is, in another mount of this tree.

    `cwd` is its $PWD, relative to the workspace where it is inside; None for what the kernel says. A folder that was
    moved, removed, closed, or entered by a link is one to which it may not get back, and so is one whose path is
    too long to be told.
    """
    try:
        now = str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return False
    if now != INSIDE and not now.startswith(f"{INSIDE}/"):
        return True
    now = os.path.relpath(now, INSIDE)
    if cwd not in (None, now):
        return False
    parts = now.split("/")
    try:
        above = [os.stat("/".join(parts[:end]), dir_fd=mount) for end in range(1, len(parts) + 1)]
    except OSError:
        return False
    return all(folder.st_mode & stat.S_IXUSR for folder in above)


def _new_namespaces() -> tuple[int, int]:
    """Descriptors of a user namespace that maps the owners of our files to themselves, and of its mounts."""
    child, alive = _native.start_namespaces()
    try:
        for name, text in _id_maps():
            Path(f"/proc/{child}/{name}").write_text(text)
        user_ns = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return user_ns, os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(user_ns)
            raise
    finally:
        os.close(alive)
        os.waitpid(child, _WALL)


def _id_maps() -> list[tuple[str, str]]:
    """Root maps everybody whom it knows, since sandboxes may run as another user; others only themselves."""
    if os.geteuid() != 0:
        users, groups = f"{os.geteuid()} {os.geteuid()} 1", f"{os.getegid()} {os.getegid()} 1"
        return [("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)]
    return [(name, _identity(Path(f"/proc/self/{name}").read_text())) for name in ("uid_map", "gid_map")]


def _identity(id_map: str) -> str:
    extents = (line.split() for line in id_map.splitlines())
    return "".join(f"{inside} {inside} {count}\n" for inside, _, count in extents)
