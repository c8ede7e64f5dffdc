"""Who owns a sandbox, a directory or a slot: a label that names one process, and whether it still lives.

A process is named by host, boot, PID namespace, number and start time, since any of these alone comes again:
numbers wrap, containers have equal ones, a reboot starts anew. The label is one word that any file name, link
or environment variable can hold, so that it can be written in one step with what it labels.
"""

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

# What a label may hold of a host's or a job's name; the rest of a file name is left for others.
NAME_CHARACTERS = 32
BOOT_CHARACTERS = 8

_LABEL = re.compile(r"(\d+)\.(\d+)\.(\d+)\.([0-9a-f]+)\.([A-Za-z0-9_-]+)(?:\.([A-Za-z0-9_-]+))?")


@dataclass(frozen=True)
class Owner:
    """One process. `start` is when it started, in clock ticks since the boot; `job` is for whoever reads it."""

    pid: int
    start: int
    namespace: int
    boot: str
    host: str
    job: str = ""

    @property
    def label(self) -> str:
        """`<pid>.<start>.<namespace>.<boot>.<host>[.<job>]`, of letters, digits, `_`, `-` and dots."""
        return ".".join(map(str, (self.pid, self.start, self.namespace, self.boot, self.host))) + (
            f".{self.job}" if self.job else ""
        )

    @classmethod
    def parse(cls, label: str) -> "Owner | None":
        """The owner that the label names; None where it is not one."""
        match = _LABEL.fullmatch(label)
        if match is None:
            return None
        pid, start, namespace, boot, host, job = match.groups()
        return cls(int(pid), int(start), int(namespace), boot, host, job or "")


def this_process(job: str = "") -> Owner:
    """This process as an owner; after a fork the child is another one. `job` is shortened to fit."""
    pid = os.getpid()
    return Owner(pid, _own_start(pid), _namespace(), _boot(), _host(), _word(job))


def is_alive(owner: Owner) -> bool | None:
    """Whether the process still runs; None where that cannot be seen from here.

    It can be seen on the same host, in the same boot and PID namespace. A process that has ended and waits
    for its parent to notice is not alive.
    """
    if not is_near(owner):
        return None
    try:
        start, state, threads = _stat(owner.pid)
    except OSError:
        return _exists(owner.pid)
    # Where the first thread has ended and others go on, the process is shown as ended, too.
    return start == owner.start and (state not in "ZX" or threads > 1)


def is_near(owner: Owner) -> bool:
    """Whether its process would be visible from here."""
    return (owner.host, owner.boot, owner.namespace) == (_host(), _boot(), _namespace())


def is_of_earlier_boot(owner: Owner) -> bool:
    """Whether a host of this name has another boot now: the owner is gone, unless two hosts share the name."""
    return owner.host == _host() and owner.boot != _boot()


def _exists(pid: int) -> bool | None:
    """What signals tell of a process whose record cannot be read: that it is gone, or nothing."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    return None


def _stat(pid: int) -> tuple[int, str, int]:
    """Start time, state and number of threads. Raises OSError."""
    # The name, in brackets, may hold anything, brackets too.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[19]), fields[0], int(fields[17])


@functools.lru_cache(maxsize=1)
def _own_start(pid: int) -> int:
    return _stat(pid)[0]


@functools.lru_cache(maxsize=1)
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:BOOT_CHARACTERS]


@functools.lru_cache(maxsize=1)
def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


@functools.lru_cache(maxsize=1)
def _host() -> str:
    return _word(os.uname().nodename) or "unnamed"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text)[:NAME_CHARACTERS]
