"""Finds the processes of a sandbox, holds them still, and says what of their doing a file's stat does not show."""

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.sandboxes.files import Running
from midstream.envs.sandboxes.marks import read_file

# Processes that start others while they are being stopped are looked for again, this often at most.
STOP_ROUNDS = 32
# A process stops when it next leaves the kernel: at once, unless it waits for a disk.
STOP_TIMEOUT_S = 5.0
STOP_POLL_S = 0.0005
# A process that waits in the kernel that long is at rest: for its vforked child, which is stopped, for one.
REST_S = 0.2

Find = Callable[[], list[int]]


def descendants(pid: int) -> list[int]:
    """The pids of all processes below this one, as far as they hold still."""
    found: list[int] = []
    queue = [pid]
    while queue:
        children = _children(queue.pop())
        found += children
        queue += children
    return found


def _children(pid: int) -> list[int]:
    """Those of all its threads; a thread that ends meanwhile must not hide the children of the others."""
    try:
        threads = _threads(pid)
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            found += map(int, read_file(f"/proc/{pid}/task/{thread}/children").split())
        except OSError:
            continue
    return found


def _threads(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (half the time)


def with_descendants(pid: int) -> list[int]:
    """This process and all below it."""
    return [pid, *descendants(pid)]


class Halt:
    """Holds processes still: from `begin` to `end` none of them runs."""

    def __init__(self, find: Find, idle: int | None = None) -> None:
        """`find` lists all processes of the sandbox.

        `idle` is one, its shell between two commands, that is at rest as long as there is no other: nothing
        wakes it, and nothing is done then.
        """
        self._find = find
        self._idle = idle
        self._held: dict[int, int] = {}
        # Those of them that were not stopped before.
        self._stopped: set[int] = set()

    def begin(self) -> None:
        """Stops the processes and waits until they are. Raises EnvironmentFailure where one goes on."""
        try:
            for _ in range(STOP_ROUNDS):
                found = self._find()
                new = [pid for pid in found if pid not in self._held]
                if not new or found == [self._idle]:
                    return
                self._hold(new)
            raise EnvironmentFailure("the sandbox starts processes faster than they can be stopped")
        except BaseException:
            self.end()
            raise

    def pids(self) -> list[int]:
        """The processes that are held."""
        return [pid for pid, pidfd in self._held.items() if not _has_ended(pidfd)]

    def end(self) -> None:
        """Lets go on what ran before."""
        for pid, pidfd in self._held.items():
            if pid in self._stopped:
                _send(pidfd, signal.SIGCONT)
            os.close(pidfd)
        self._held.clear()
        self._stopped.clear()

    def _hold(self, new: list[int]) -> None:
        for pid in new:
            try:
                self._held[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
        # A number that is found again names what the descriptor holds, and not a newcomer elsewhere.
        again = set(self._find())
        for pid in self._held.keys() & set(new):
            if pid not in again:
                os.close(self._held.pop(pid))
            elif _state(pid) != "T":
                self._stop(pid)
        for pid in self._held.keys() & set(new):
            self._wait(pid)

    def _stop(self, pid: int) -> None:
        self._stopped.add(pid)
        _send(self._held[pid], signal.SIGSTOP)

    def _wait(self, pid: int) -> None:
        began = time.monotonic()
        while (state := _state(pid)) not in "TtZX":
            waited_s = time.monotonic() - began
            if state == "D" and waited_s > REST_S:
                return
            if waited_s > STOP_TIMEOUT_S:
                raise EnvironmentFailure(f"process {pid} does not stop: it is in state {state!r}")
            if pid not in self._stopped:
                # Another process of the sandbox let it go on.
                self._stop(pid)
            time.sleep(STOP_POLL_S)


def describe(pids: list[int], shell: int, init_pid: int | None) -> Running:
    """What these stopped processes, of which one is the shell, mean for whoever records the files."""
    mapped: set[tuple[int, int]] = set()
    for pid in pids:
        mapped |= shared_mappings(pid)
    background = sum(pid != shell and _state(pid) not in "ZX" for pid in pids)
    return Running(init_pid, background, frozenset(mapped))


def shared_mappings(pid: int) -> set[tuple[int, int]]:
    """Device and inode of each file that the process maps shared; none where it has ended.

    Those that are not writable now count, too: mprotect(2) takes that away and gives it back with no trace.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return set()
    found = set()
    for line in lines:
        _, permissions, _, device, inode, *path = line.split(None, 5)
        if permissions[3:4] != b"s" or inode == b"0":
            continue
        major, _, minor = device.partition(b":")
        found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
        if path:
            # On some file systems (btrfs, overlays) stat knows another device than the mapping does.
            try:
                there = os.stat(  # noqa: PTH116 (a path of bytes)
                    b"/proc/%d/root%b" % (pid, path[0])
                )
            except OSError:
                continue
            found.add((there.st_dev, there.st_ino))
    return found


def _state(pid: int) -> str:
    """One letter: that of the thread that is furthest from rest. X where the process has ended."""
    try:
        fields = read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, 18)
        if int(fields[17]) <= 1:
            return chr(fields[0][0])
        states = {_thread_state(pid, thread) for thread in _threads(pid)}
    except OSError:
        return "X"
    return next((state for state in sorted(states) if state not in "DTtZX"), None) or min(states)


def _thread_state(pid: int, thread: str) -> str:
    try:
        return chr(read_file(f"/proc/{pid}/task/{thread}/stat").rpartition(b")")[2].split(None, 1)[0][0])
    except OSError:
        return "X"


def _has_ended(pidfd: int) -> bool:
    # Unlike select(2), poll(2) takes descriptors of any number.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _send(pidfd: int, number: signal.Signals) -> None:
    if not _has_ended(pidfd):
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return
