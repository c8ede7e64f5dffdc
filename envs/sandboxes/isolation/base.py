"""What an isolation is to the shell that it keeps from the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from midstream.envs.sandboxes.isolation.cgroups import Cgroup

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class IsolationUnavailable(Exception):
    """The isolation that was asked for does not work here; the message says what can be done."""


@dataclass(frozen=True)
class Launch:
    """How the process of a sandbox is started.

    `environment` is for the program itself and does not reach the shell; `fds` are the descriptors that it
    inherits beside those of the shell.
    """

    argv: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    fds: tuple[int, ...] = ()


class Isolation(Protocol):
    """Builds the command that runs a sandbox's shell, and says what holds that back."""

    @property
    def name(self) -> str: ...
    @property
    def has_namespaces(self) -> bool: ...

    @property
    def owner(self) -> tuple[int, int] | None:
        """The uid and gid on this host to which the workspace's files must belong; None: the caller's."""
        ...

    def new_cgroup(self) -> Cgroup | None:
        """A group that holds the limits of one sandbox as a whole; None where none can be made."""
        ...

    def root(self, directory: Path) -> str:
        """The path under which the sandbox itself sees its directory."""
        ...

    def launch(self, directory: Path, shell: Sequence[str], info_fd: int | None) -> Launch:
        """The command. `shell` is a program with its arguments, found on PATH; into `info_fd` goes, as JSON, the
        first process of the namespaces.
        """
        ...

    def preamble(self) -> str:
        """Shell text that comes before all else: it gives up what the shell must not have."""
        ...

    def attach(self, directory: Path, init_pid: int | None) -> None:
        """Puts the directory before a shell that has started, where `launch` could not. Blocks; raises OSError."""
        ...

    def limits_in_words(self) -> tuple[str, ...]:
        """What holds the processes of a sandbox back here."""
        ...
