"""The mark by which processes of sandboxes are found that nothing else leads to: a variable of their environment.

It names the process that started the sandbox, so that what a killed job left behind can be told from what a
live one uses.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from midstream.envs.ownership.owners import Owner, is_alive, this_process

MARK = "MIDSTREAM_SANDBOX"
END_POLL_S = 0.002
END_TIMEOUT_S = 5.0
READ_BYTES = 1 << 17


def new_mark(place: str = "") -> str:
    """A value of MARK for one sandbox of this process, whose directory has this name."""
    return f"{this_process().label}+{place.replace('+', '-')}.{secrets.token_hex(8)}"


def place_of(pid: int) -> str:
    """The name of the directory of the sandbox that a process was started for; "" where nothing tells."""
    return _mark_of(pid).rpartition("+")[2].rpartition(".")[0]


def processes_of(session: int, mark: str) -> list[int]:
    """The processes of a session, and those with the mark in their environment.

    Takes some 20 µs for each process of the machine. Those of other users are not seen.
    """
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in _all_processes() if _is_of(pid, session, wanted)]


def find_marked_processes() -> list[int]:
    """The processes of sandboxes whose owner has ended, on this host and as far as this process can tell."""
    alive: dict[str, bool | None] = {}
    found = []
    for pid in _all_processes():
        label = _mark_of(pid).rpartition("+")[0]
        if not label:
            continue
        if label not in alive:
            owner = Owner.parse(label)
            alive[label] = None if owner is None else is_alive(owner)
        if alive[label] is False:
            found.append(pid)
    return found


def end_all(find: Callable[[], list[int]]) -> None:
    """Kills what `find` returns until it returns nothing. Raises TimeoutError."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while found := find():
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {found} outlive SIGKILL by {END_TIMEOUT_S} s")
        time.sleep(END_POLL_S)


def read_file(path: str) -> bytes:
    """The first READ_BYTES of a file of /proc. Raises OSError, also for a process that has ended."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, READ_BYTES)
    finally:
        os.close(fd)


def _all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _is_of(pid: int, session: int, mark: bytes) -> bool:
    try:
        state, _, _, of_session, *_ = read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, 4)
        if state in b"ZX":
            return False
        return int(of_session) == session or mark in read_file(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return False


def _mark_of(pid: int) -> str:
    try:
        for variable in read_file(f"/proc/{pid}/environ").split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == MARK.encode():
                return value.decode("ascii", "replace")
    except OSError:
        pass
    return ""
