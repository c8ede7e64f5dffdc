"""The processes that a test has started; those of fixtures that serve the whole session are not its own."""

import os
import time
from pathlib import Path

from midstream.envs.sandboxes.processes import descendants

# On a busy machine; nothing waits for it where all goes well.
GONE_WITHIN_S = 10.0

# A command that lasts, and that no other run of these tests uses.
NAP = f"sleep {100_000 + os.getpid()}"

earlier: set[int] = set()


def started_here() -> list[int]:
    """Processes below this one that were not there when the test began."""
    return [pid for pid in descendants(os.getpid()) if pid not in earlier]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def open_file_count() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def wait_until_gone(pids: list[int]) -> list[int]:
    """The pids that are still there after a while."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := [pid for pid in pids if not is_gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def napping() -> list[int]:
    """The processes on this machine that run NAP."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if read_command(pid) == NAP.replace(" ", "\0") + "\0" and not is_gone(pid)]
