"""How the workspace of a local sandbox is kept, apart from the processes that work in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import SandboxSpec


@dataclass(frozen=True)
class Running:
    """What lives in the sandbox while its files are recorded; all of it is stopped.

    `init_pid` is the host's number of the first process of its namespaces, None where there are none or no
    shell runs. `background` counts the processes beside the shell, `mapped` the files, by device and inode,
    that some process maps shared and writable: their stat tells nothing about their content.
    """

    init_pid: int | None = None
    background: int = 0
    mapped: frozenset[tuple[int, int]] = frozenset()


@dataclass(eq=False, kw_only=True)
class Frozen:
    """A state of a workspace that nothing changes any more; `snapshot` once it is recorded.

    `remounted`: the shell must enter its directory again before its next command.
    """

    remounted: bool = False
    snapshot: Snapshot | None = None


F = TypeVar("F", bound=Frozen)


class Files(Protocol[F]):
    """The workspace of one sandbox. Calls block, come one at a time, and may come from any thread."""

    @property
    def directory(self) -> Path:
        """What the sandbox's processes are given as their workspace when they start."""
        ...

    def create(self, spec: SandboxSpec) -> None:
        """The workspace's first content. Raises EnvironmentFailure."""
        ...

    def attach(self, init_pid: int | None) -> None:
        """Puts the workspace before a shell that has just started, ahead of its first command."""
        ...

    def open(self, init_pid: int | None) -> int:
        """A descriptor of the workspace as the shell that runs now sees it; the caller closes it."""
        ...

    def freeze(self, state: Mapping[str, str], running: Running) -> F:
        """Holds on to the state of now; when it returns, the sandbox may go on.

        Raises WorkspaceLimit or SnapshotError, with nothing changed.
        """
        ...

    def harvest(self, frozen: F) -> Snapshot:
        """The snapshot of a frozen state, which is then in the store; before `destroy`.

        Raises WorkspaceLimit or SnapshotError, and can then be called again.
        """
        ...

    def restore(self, snapshot: Snapshot, spec: SandboxSpec) -> dict[str, str]:
        """Makes the workspace that of the snapshot; no process runs. Returns the state recorded beside it.

        `spec` is what the sandbox that it was taken of began with, and may make up most of it.

        Raises SnapshotMissing, RestoreMismatch or SnapshotError.
        """
        ...

    def destroy(self) -> None:
        """Removes all that is on disk; no process runs. Fine when there is nothing."""
        ...
