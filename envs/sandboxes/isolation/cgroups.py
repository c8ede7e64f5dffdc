"""Control groups: limits on a sandbox as a whole, and a list of its processes that none of them can leave.

They are made where this user may: below the own group of this process (version 1 as root; version 2 where its
subtree is delegated and has no processes), or beside it (version 2, as systemd delegates to users).
"""

import functools
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from midstream.envs.ownership.owners import Owner, is_alive, this_process
from midstream.envs.sandboxes.isolation.limits import ProcessLimits

PREFIX = "midstream+"
# A killed process leaves its group when the kernel gets to it.
REMOVE_POLL_S = 0.002
REMOVE_TIMEOUT_S = 5.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cgroup:
    """The group of one sandbox. `home` is where this process was, in the kernel's words, if that is just above it."""

    path: Path
    version: Literal[1, 2]
    home: str | None = None

    @contextmanager
    def births(self) -> Iterator[bool]:
        """Yields whether what this thread starts in the block is in the group from its first instruction.

        In version 1 a thread can move itself there and back, in microseconds since Linux 5.13, while moving another
        process takes a lock that keeps all of the host's processes from being forked for milliseconds. For the time
        of the block the group's processes are this one too. Elsewhere this does nothing and yields False.
        """
        if self.home is None or self.home != _memory_group_of_this_thread():
            yield False
            return
        # Opened before: a thread that is in the group must get out of it whatever there is a lack of.
        way_back = os.open(self.path.parent / "tasks", os.O_WRONLY | os.O_CLOEXEC)
        try:
            try:
                _write(self.path / "tasks", "0")
            except OSError:
                yield False
                return
            try:
                yield True
            finally:
                os.write(way_back, b"0")
        finally:
            os.close(way_back)

    def add(self, pid: int) -> None:
        """Moves a process into the group; what it starts from then on is in it too. One that has ended is fine."""
        try:
            _write(self.path / "cgroup.procs", str(pid))
        except ProcessLookupError:
            return

    def pids(self) -> list[int]:
        """All processes in the group; none where it is gone."""
        try:
            return [int(pid) for pid in (self.path / "cgroup.procs").read_bytes().split()]
        except OSError:
            return []

    def out_of_memory_kills(self) -> int:
        """How many processes the kernel has ended because the group was at its limit. Raises OSError.

        It counts those that it ended because the host was at its own, too: they are left out as long as the
        group has not met its limit.
        """
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        counts = dict(line.split() for line in (self.path / name).read_text().splitlines())
        met = (self.path / "memory.failcnt").read_text() if self.version == 1 else counts.get("oom", "0")
        return int(counts.get("oom_kill", "0")) if int(met) else 0

    def remove(self) -> None:
        """Ends every process in the group and removes it; one that is gone is fine.

        Blocks while processes end. Raises OSError where the group stays for REMOVE_TIMEOUT_S.
        """
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        while True:
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                self.kill()
                time.sleep(REMOVE_POLL_S)
            else:
                return

    def kill(self) -> None:
        """Sends SIGKILL to every process in the group but this one, which may be there for the time of a `births`."""
        for pid in set(self.pids()) - {os.getpid()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@dataclass(frozen=True)
class CgroupRoot:
    """A group below which this process may make others. `top` is where its hierarchy is mounted.

    `own` is what the kernel calls it where it is this process' own group, of version 1.
    """

    path: Path
    version: Literal[1, 2]
    top: Path
    own: str | None = None

    def new(self, limits: ProcessLimits) -> Cgroup:
        """A group with these limits, named after this process. Raises OSError."""
        group = Cgroup(
            self.path / f"{PREFIX}{this_process().label}+{secrets.token_hex(6)}",
            self.version,
            self.own,
        )
        group.path.mkdir()
        try:
            if self.version == 1:
                _write(group.path / "memory.limit_in_bytes", str(limits.memory_bytes))
            else:
                _write(group.path / "memory.max", str(limits.memory_bytes))
                _write_if_there(group.path / "memory.swap.max", "0")
                _write_if_there(group.path / "pids.max", str(limits.processes))
        except OSError:
            group.path.rmdir()
            raise
        return group

    def holds(self) -> tuple[str, ...]:
        """Which fields of the limits its groups hold."""
        counts = self.version == 2 and "pids" in _controllers(self.path)
        return ("memory_bytes", "processes") if counts else ("memory_bytes",)


def find_cgroup_root() -> CgroupRoot | None:
    """Where this process may make groups; None where it may not. Tried once for each process."""
    return _find_cgroup_root(os.getpid())


def list_leftover_cgroups() -> list[Path]:
    """The groups of this user's processes that have ended, on this host and as far as this process can tell.

    They may lie anywhere in the hierarchy: a job is started in another group each time by some.
    """
    root = find_cgroup_root()
    if root is None:
        return []
    leftover = []
    for path in _named_below(root.top):
        owner = Owner.parse(path.name.removeprefix(PREFIX).rpartition("+")[0])
        if owner is not None and is_alive(owner) is False and _is_own(path):
            leftover.append(path)
    return leftover


def remove_leftover_cgroups() -> int:
    """Removes those groups with the processes in them, and returns how many. Raises OSError where one stays."""
    root = find_cgroup_root()
    leftover = list_leftover_cgroups()
    for path in leftover:
        assert root is not None
        Cgroup(path, root.version).remove()
    return len(leftover)


@functools.lru_cache(maxsize=1)
def _find_cgroup_root(pid: int) -> CgroupRoot | None:
    for root in _candidates():
        try:
            _try(root)
        except OSError as error:
            _logger.debug("no control groups below %s: %s", root.path, error)
            continue
        return root
    return None


def _try(root: CgroupRoot) -> None:
    """Makes a group, moves a process into it and removes both. Raises OSError where that is not allowed."""
    group = root.new(ProcessLimits())
    try:
        # It ends with its input, which closes with this block and with this process.
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as probe:
            group.add(probe.pid)
    finally:
        group.remove()


def _named_below(group: Path) -> Iterator[Path]:
    """Groups of sandboxes in this one or deeper; what is in them is no group of ours."""
    try:
        below = [Path(entry.path) for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in below:
        if path.name.startswith(PREFIX):
            yield path
        else:
            yield from _named_below(path)


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _candidates() -> Iterator[CgroupRoot]:
    mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for controllers, path in _groups_of("self"):
        for mount in mounts:
            dash = mount.index("-")
            kind, options = mount[dash + 1], mount[dash + 3].split(",")
            below = _below(mount[4], mount[3], path)
            if not controllers and kind == "cgroup2":
                # A group with processes in it has no children with limits, unless it is the topmost.
                for group in (below, below.parent):
                    if "memory" in _controllers(group):
                        yield CgroupRoot(group, 2, Path(mount[4]))
            elif "memory" in controllers.split(",") and kind == "cgroup" and "memory" in options:
                yield CgroupRoot(below, 1, Path(mount[4]), path if path.startswith(mount[3]) else None)


def _memory_group_of_this_thread() -> str | None:
    groups = _groups_of("thread-self")
    return next((path for controllers, path in groups if "memory" in controllers.split(",")), None)


def _groups_of(task: str) -> list[tuple[str, str]]:
    """Of a name in /proc: the controllers of each hierarchy, none for version 2, and its group there."""
    lines = Path(f"/proc/{task}/cgroup").read_text().splitlines()
    return [(controllers, path) for _, controllers, path in (line.split(":", 2) for line in lines)]


def _below(mount_point: str, mounted: str, path: str) -> Path:
    """Where a group lies of which this part of the hierarchy is mounted."""
    return (
        Path(mount_point, os.path.relpath(path, mounted)) if path.startswith(mounted) else Path(mount_point)
    )


def _controllers(group: Path) -> list[str]:
    try:
        return (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return []


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _write_if_there(path: Path, text: str) -> None:
    try:
        _write(path, text)
    except FileNotFoundError:
        return
