"""Overlay mounts for sandboxes, made from outside of them.

A mount is made in namespaces of our own, where the layers are visible and their owners are mapped, and is given
to a sandbox as a descriptor: no path of a layer exists in there. Those namespaces have no process; the
descriptors keep them, so they are gone when this process is. It works the same for root and for anybody else.

Linux 5.11 is needed, the first that mounts an overlay in a user namespace; 5.12 also closes the folder below the
mount. From 6.15 on a mount is never in any tree before it is in the sandbox's, which saves 0.1 ms.
"""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from midstream.envs.sandboxes.overlay import _native

# The one folder at the top of every layer, which is what a sandbox gets of a mount. The layer can then be closed
# by a rename of this folder, while the mount that made it still holds the folder above.
WORKSPACE = "workspace"
LAYER, UPPER, WORK = "layer", "upper", "work"
# The kernel takes 500 lower layers, and mount(2) a page of options.
MAX_LOWERS = 256
_NS_GET_USERNS = 0xB701
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


def attach(fd: int, init_pid: int, target: str, there: os.stat_result, *, replaces: bool) -> None:
    """Puts a mount at `target` of a started sandbox, over the directory `there` or in place of the mount there.

    Raises OSError: ESTALE where something else is at the target, which is then left alone.
    """
    mount_ns = os.open(f"/proc/{init_pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Of the user namespaces that bubblewrap nests, this is the one that may change the mounts.
        user_ns = fcntl.ioctl(mount_ns, _NS_GET_USERNS)
        try:
            _native.attach(user_ns, mount_ns, fd, target.encode(), replaces, there.st_dev, there.st_ino)
        finally:
            os.close(user_ns)
    finally:
        os.close(mount_ns)


def holds_open(pid: int, mount: int) -> bool:
    """Whether a process has a file of the mount open. Raises OSError where the process is gone."""
    ours = _mount_id(f"/proc/self/fdinfo/{mount}")
    with os.scandir(f"/proc/{pid}/fdinfo") as table:
        return any(_mount_id(entry.path) == ours for entry in table)


def _mount_id(fdinfo: str) -> bytes | None:
    try:
        fd = os.open(fdinfo, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # Closed since it was listed.
        return None
    try:
        content = os.read(fd, 4096)
    finally:
        os.close(fd)
    return content.partition(b"mnt_id:")[2].partition(b"\n")[0].strip()


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
