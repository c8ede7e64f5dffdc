"""What a sandbox may use of the machine, and how its shell holds itself and its children to that."""

import functools
import os
from dataclasses import dataclass

KIB = 1024
# The shell keeps a descriptor of its own where commands do not stumble over it.
MIN_OPEN_FILES = 128


@dataclass(frozen=True)
class ProcessLimits:
    """What the processes of one sandbox may use. How long a command may take comes with each command, how much
    of its output is kept with each session.

    Held everywhere, as limits that no process without privilege can raise: `file_bytes`, `open_files` and
    `process_memory_bytes`. Held by bubblewrap: `processes`, from Linux 5.14 on, and `tmp_bytes`. Held where
    this user may make control groups: `memory_bytes`, and `processes` where the groups are of version 2.
    """

    processes: int = 512
    """Processes and threads of the sandbox at once."""
    memory_bytes: int = 4 << 30
    """Of the sandbox as a whole, with its page cache, /tmp and /dev/shm; the kernel kills a process of it where
    it would need more."""
    process_memory_bytes: int | None = None
    """Of the private memory that one process may write to (RLIMIT_DATA): address space that is merely reserved,
    as many runtimes do, does not count. None: as `memory_bytes`."""
    file_bytes: int = 1 << 30
    """Of one file that a process writes."""
    open_files: int = 1024
    """Of one process."""
    tmp_bytes: int = 64 << 20
    """Of /tmp and of /dev/shm, each; both are gone with the shell."""

    @property
    def data_bytes(self) -> int:
        """What a process may have of memory."""
        return self.memory_bytes if self.process_memory_bytes is None else self.process_memory_bytes

    def __post_init__(self) -> None:
        """Raises ValueError for a limit that leaves no room for the shell itself."""
        if self.open_files < MIN_OPEN_FILES:
            raise ValueError(f"limits.open_files={self.open_files}: give {MIN_OPEN_FILES} or more")


DEFAULT_LIMITS = ProcessLimits()


def shell_limits(limits: ProcessLimits, *, own_user_namespace: bool) -> str:
    """Shell text that sets the limits of the shell and of what it starts."""
    wanted = [
        "-c 0",
        f"-f {limits.file_bytes // KIB}",
        f"-n {limits.open_files}",
        f"-d {limits.data_bytes // KIB}",
    ]
    if own_user_namespace and counts_processes_by_namespace():
        wanted.append(f"-u {limits.processes}")
    return "; ".join(f"builtin ulimit {one}" for one in wanted)


def limits_of_a_process(limits: ProcessLimits) -> tuple[str, ...]:
    """In words, what `shell_limits` holds everywhere."""
    return (
        f"a file: {in_words(limits.file_bytes)}",
        f"a process: {limits.open_files} open files, {in_words(limits.data_bytes)} of memory",
    )


def in_words(size_bytes: int) -> str:
    """A size in the largest unit that divides it: 64 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes % (1 << power) == 0 and size_bytes:
            return f"{size_bytes >> power} {unit}"
    return f"{size_bytes} bytes"


@functools.lru_cache(maxsize=1)
def counts_processes_by_namespace() -> bool:
    """Whether the limit on processes counts those of the namespace, not all of the user (Linux 5.14)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
