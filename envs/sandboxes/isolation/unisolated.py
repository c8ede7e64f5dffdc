"""Runs a sandbox's shell as a process of this user, which nothing keeps from the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.envs.sandboxes.isolation.base import Launch
from midstream.envs.sandboxes.isolation.cgroups import Cgroup, CgroupRoot
from midstream.envs.sandboxes.isolation.limits import (
    DEFAULT_LIMITS,
    ProcessLimits,
    in_words,
    limits_of_a_process,
    shell_limits,
)
from midstream.envs.sandboxes.marks import MARK, read_file
from midstream.envs.sandboxes.spawning import lifeline

# Ends what carries the mark, then its own process group, when the last holder of the lifeline is gone. Builtins
# alone: it has no other program to wait for. Twice, for what was started while it looked.
_WATCHER = (
    "( builtin read -r -u {lifeline}; for __t in 1 2; do for __d in /proc/[0-9]*; do "
    '[[ $__d == /proc/$BASHPID ]] || {{ builtin mapfile -d "" __e < $__d/environ; '
    '[[ ${{__e[*]}} != *"{mark}=${{{mark}}}"* ]] || builtin kill -KILL "${{__d#/proc/}}"; }}; done; done; '
    "builtin kill -KILL 0 ) </dev/null >/dev/null 2>&1 &"
)


@dataclass(frozen=True)
class Unisolated:
    """No isolation: the shell is a process of this user, in a session of its own, with limits on resources.

    What a command leaves behind is found by its process group, its session, the mark in its environment, and
    the control group where one can be made; a watcher ends the first three when this process is killed. Where
    no control group can be made, a process that leaves its session, clears its environment and is no child of
    the shell any more gets away. Root's commands can raise the limits and leave the group.
    """

    limits: ProcessLimits = DEFAULT_LIMITS
    cgroups: CgroupRoot | None = None
    name = "none"
    has_namespaces = False
    owner = None

    def root(self, directory: Path) -> str:
        return str(directory.absolute())

    def launch(self, directory: Path, shell: Sequence[str], info_fd: int | None) -> Launch:
        watcher = _WATCHER.format(lifeline=lifeline(), mark=MARK)
        enter = f'{watcher} builtin cd -- "$1" && builtin shift && exec "$@" {lifeline()}<&-'
        argv = ["bash", "--norc", "--noprofile", "-c", enter, "bash", str(directory.absolute()), *shell]
        return Launch(argv, fds=(lifeline(),))

    def preamble(self) -> str:
        return shell_limits(self.limits, own_user_namespace=False)

    def new_cgroup(self) -> Cgroup | None:
        return None if self.cgroups is None else self.cgroups.new(self.limits)

    def attach(self, directory: Path, init_pid: int | None) -> None:
        """The shell started in the directory itself."""

    def limits_in_words(self) -> tuple[str, ...]:
        groups = () if self.cgroups is None else self.cgroups.holds()
        return (
            "files and network: all that this user may",
            *((f"processes: {self.limits.processes}",) if "processes" in groups else ()),
            *((f"all memory: {in_words(self.limits.memory_bytes)}",) if "memory_bytes" in groups else ()),
            *limits_of_a_process(self.limits),
        )


def is_watcher(pid: int) -> bool:
    """Whether this is a watcher, which must go on while the rest of its sandbox is stopped."""
    try:
        return f"builtin read -r -u {lifeline()};".encode() in read_file(f"/proc/{pid}/cmdline")
    except OSError:
        return False
