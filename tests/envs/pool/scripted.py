"""Backends for tests of the pool.

A hosted provider's throttling, quota and outages need an account that tests cannot have: ScriptedBackend stands
in for one, in this process, and answers as it is told. FolderBackend makes real directories and processes.
"""

import asyncio
import os
import secrets
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure, SandboxFailure, SnapshotMissing
from midstream.envs.ownership import claims
from midstream.envs.protocol import Change, Snapshot
from midstream.envs.sandboxes.marks import MARK
from midstream.envs.sandboxes.protocol import Capabilities, ExecResult, SandboxSpec
from midstream.envs.store.removal import remove_tree


class ScriptedSandbox:
    def __init__(self, backend: "ScriptedBackend", name: str, snapshot: Snapshot) -> None:
        self.backend = backend
        self.id = name
        self.state = snapshot
        self.paused = False
        self.dead = False

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        await self._answer()
        return ExecResult("", 0, False, False, 0.0)

    async def exec_fresh(self, command: str, timeout_s: float) -> ExecResult:
        return await self.exec(command, timeout_s)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        raise NotImplementedError

    async def write_file(self, path: str, content: bytes) -> None:
        raise NotImplementedError

    async def snapshot(self) -> Snapshot:
        await self._answer()
        return self.state

    async def restore(self, snapshot: Snapshot) -> None:
        self.state = snapshot

    async def pause(self) -> None:
        await self._answer()
        self.paused = True

    async def resume(self) -> None:
        await self._answer()
        self.paused = False

    async def destroy(self) -> None:
        self.backend.destroys += 1
        await asyncio.sleep(self.backend.seconds)
        if self.backend.destroy_failures > 0:
            self.backend.destroy_failures -= 1
            raise EnvironmentFailure(f"the provider lost {self.id}")
        self.backend.live.pop(self.id, None)

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.dead or self.id not in self.backend.live:
            raise EnvironmentFailure(f"sandbox {self.id} is gone")


class ScriptedBackend:
    """Creations take `seconds` and raise what `failures` holds, one after the other, then succeed."""

    name = "scripted"

    def __init__(self, seconds: float = 0.001, failures: Iterable[BaseException] = ()) -> None:
        self.seconds = seconds
        self.failures = deque(failures)
        self.outage: Callable[[], BaseException | None] = lambda: None
        self.capabilities = Capabilities("none", max_forks=4)
        self.live: dict[str, ScriptedSandbox] = {}
        self.most_live = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.calls: list[float] = []
        self.destroys = 0
        self.destroy_failures = 0
        self.owners: set[str] = set()

    async def create(self, spec: SandboxSpec) -> ScriptedSandbox:
        return await self._made(spec, Snapshot("start", "start"))

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> ScriptedSandbox:
        if snapshot.id == "missing":
            raise SnapshotMissing("there is no snapshot of this id")
        return await self._made(spec, snapshot)

    async def fork(
        self, spec: SandboxSpec, snapshot: Snapshot, count: int
    ) -> Sequence[ScriptedSandbox | SandboxFailure]:
        assert count <= (self.capabilities.max_forks or count)
        made: list[ScriptedSandbox | SandboxFailure] = []
        for _ in range(count):
            try:
                made.append(await self.restore(spec, snapshot))
            except SandboxFailure as failure:
                made.append(failure)
        return made

    async def diff(self, before: Snapshot | None, after: Snapshot) -> tuple[Change, ...]:
        raise NotImplementedError

    async def export_snapshot(self, snapshot: Snapshot, to: Path) -> None:
        raise NotImplementedError

    async def import_snapshot(self, source: Path) -> Snapshot:
        raise NotImplementedError

    async def gc(self, keep: Iterable[str] = ()) -> int:
        return 0

    async def close(self) -> None:
        return

    async def _made(self, spec: SandboxSpec, snapshot: Snapshot) -> ScriptedSandbox:
        self.calls.append(asyncio.get_running_loop().time())
        self.owners.add(spec.owner)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.in_flight -= 1
        failure = self.failures.popleft() if self.failures else self.outage()
        if failure is not None:
            raise failure
        sandbox = ScriptedSandbox(self, secrets.token_hex(4), snapshot)
        self.live[sandbox.id] = sandbox
        self.most_live = max(self.most_live, len(self.live))
        return sandbox


class FolderSandbox(ScriptedSandbox):
    """A directory with a file in it, and a process without namespaces that carries its owner's mark."""

    def __init__(self, backend: "FolderBackend", name: str, snapshot: Snapshot, label: str) -> None:
        super().__init__(backend, name, snapshot)
        self.directory = backend.root / name
        claims.claim(self.directory, label)
        (self.directory / "deep").mkdir(parents=True)
        (self.directory / "deep" / "file").write_text("content")
        self.process = subprocess.Popen(
            ["sleep", "600"],
            cwd=self.directory,
            env={**os.environ, MARK: f"{label}+{name}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def destroy(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        remove_tree(self.directory)
        claims.release(self.directory)
        await super().destroy()


class FolderBackend(ScriptedBackend):
    name = "folders"

    def __init__(self, root: Path, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.root = root

    async def _made(self, spec: SandboxSpec, snapshot: Snapshot) -> ScriptedSandbox:
        await asyncio.sleep(self.seconds)
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        sandbox = FolderSandbox(self, name, snapshot, spec.owner)
        self.live[name] = sandbox
        return sandbox
