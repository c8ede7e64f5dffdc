"""What a backend and a sandbox are to the layers above: one shape for local ones and for hosted providers.

A backend makes sandboxes and keeps their snapshots. A sandbox is one isolated machine or process tree with a
workspace of files. Everything that waits is a coroutine and blocks no event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from midstream.envs.errors import SandboxFailure
from midstream.envs.protocol import Change, Snapshot


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; the layers above ask this and never the backend's name.

    `memory_state`: a snapshot holds the live process tree; without it, a restored shell is a new process with
    the recorded working directory and exported variables. `snapshot_pauses_source`: commands wait meanwhile.
    `max_forks`: of one call, None for no limit. `ttl_s`: the provider ends a sandbox that old, None: never.
    `isolation` and `limits` say in words what holds commands back here.
    """

    isolation: str
    limits: tuple[str, ...] = ()
    memory_state: bool = False
    snapshot_pauses_source: bool = True
    forks_by_mount: bool = False
    max_forks: int | None = None
    ttl_s: float | None = None


@dataclass(frozen=True)
class SandboxSpec:
    """What a new sandbox begins with.

    `files` are texts by relative path, `workdir` the folder, relative to the workspace, that is HOME and
    where the shell starts. `base` names contents that many sandboxes share (a task's key): a backend may
    prepare them once. `owner` is the label by which a reaper tells whose it is.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "."
    base: str | None = None
    owner: str = ""
    max_output_bytes: int = 65536


@dataclass(frozen=True)
class ExecResult:
    """How a command ended. `output` is stdout and stderr as they came, bounded where `truncated`.

    `shell_replaced` says that the shell did not outlive the command: background processes, functions and
    variables that were not exported are lost, the working directory and exported variables are as they were
    before the command.
    """

    output: str
    exit_code: int
    timed_out: bool
    truncated: bool
    seconds: float
    shell_replaced: bool = False


class Sandbox(Protocol):
    """One live sandbox. A single coroutine at a time may use it; any method may raise EnvironmentFailure."""

    @property
    def id(self) -> str:
        """Names it in its backend, in logs and to the reaper."""
        ...

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        """Runs a command in the sandbox's one shell."""
        ...

    async def exec_fresh(self, command: str, timeout_s: float) -> ExecResult:
        """Ends the shell with its background processes, then runs a command in a clean one."""
        ...

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """The content of a regular file of the workspace, without following a link out of it."""
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Replaces a file of the workspace, without following a link out of it."""
        ...

    async def snapshot(self) -> Snapshot:
        """The state now; the last snapshot itself where nothing changed.

        Raises WorkspaceLimit where the agent made the workspace unrecordable, SnapshotError for the rest.
        """
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Puts this sandbox into the state of the snapshot, in place; its processes end.

        Raises SnapshotMissing, or RestoreMismatch where the state is another one afterwards.
        """
        ...

    async def pause(self) -> None:
        """Stops all processes; nothing runs and nothing is written until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def destroy(self) -> None:
        """Releases everything; at any time, also twice and after a cancelled call."""
        ...


class Backend(Protocol):
    """Makes sandboxes of one kind and keeps their snapshots. Creation may raise SandboxFailure."""

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> Sandbox:
        """A new sandbox in the state of the snapshot. Raises SnapshotMissing, RestoreMismatch, too."""
        ...

    async def fork(
        self, spec: SandboxSpec, snapshot: Snapshot, count: int
    ) -> Sequence[Sandbox | SandboxFailure]:
        """So many sandboxes in the state of one snapshot, of which each may fail on its own."""
        ...

    async def diff(self, before: Snapshot | None, after: Snapshot) -> tuple[Change, ...]:
        """What differs between two snapshots, by path."""
        ...

    async def export_snapshot(self, snapshot: Snapshot, to: Path) -> None:
        """One file that `import_snapshot` of any backend on any host takes."""
        ...

    async def import_snapshot(self, source: Path) -> Snapshot: ...

    async def pin(self, snapshot: Snapshot, owner: str) -> None:
        """Keeps the snapshot, also through a power cut, until its owner forgets it. Raises SnapshotMissing."""
        ...

    async def forget(self, snapshots: Sequence[Snapshot], owner: str) -> None:
        """Nobody will restore these again, as far as this owner of pins is concerned."""
        ...

    async def sweep(self) -> int:
        """Frees what forgotten snapshots alone needed; returns the bytes."""
        ...

    async def gc(self, keep: Iterable[str] = ()) -> int:
        """Deletes snapshots that are neither pinned nor named; returns the bytes freed."""
        ...

    async def close(self) -> None:
        """Destroys what is left and gives back the backend's own resources."""
        ...
