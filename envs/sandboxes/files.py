"""How the workspace of a local sandbox is kept, apart from the processes that work in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


class Files(Protocol):
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

    def snapshot(self, state: Mapping[str, str], running: Running) -> tuple[Snapshot, bool]:
        """The snapshot of now, and whether the shell must enter its directory again.

        Raises WorkspaceLimit or SnapshotError.
        """
        ...

    def restore(self, snapshot: Snapshot) -> dict[str, str]:
        """Makes the workspace that of the snapshot; no process runs. Returns the state recorded beside it.

        Raises SnapshotMissing, RestoreMismatch or SnapshotError.
        """
        ...

    def destroy(self) -> None:
        """Removes all that is on disk; no process runs. Fine when there is nothing."""
        ...
