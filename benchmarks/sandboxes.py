"""One live sandbox over an overlay, with a clock at each step of its snapshots and forks."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from trees import CHANGED_PATHS, Turn

from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.backend import LocalBackend
from midstream.envs.sandboxes.choose import choose_backend
from midstream.envs.sandboxes.isolation import choose_isolation
from midstream.envs.sandboxes.local import LocalSandbox
from midstream.envs.sandboxes.overlay.files import OverlayFiles
from midstream.envs.sandboxes.protocol import SandboxSpec
from midstream.envs.store.store import SnapshotStore

T = TypeVar("T")

SETUP_TIMEOUT_S = 60.0
EXEC_TIMEOUT_S = 60.0


class OverlaySandbox:
    """A sandbox of the overlay backend; methods return seconds."""

    def __init__(self, backend: LocalBackend, spec: SandboxSpec, sandbox: LocalSandbox) -> None:
        self._backend = backend
        self._spec = spec
        self._sandbox = sandbox
        # The two halves of a snapshot have no public entry of their own.
        self._files = sandbox._files
        self._session = sandbox._session
        self._places = 0
        self.last: Snapshot | None = None

    @classmethod
    async def start(cls, root: Path, texts: dict[str, str]) -> "OverlaySandbox":
        """The first sandbox of a backend below `root`, whose base is the tree."""
        spec = SandboxSpec(files=texts, base="tree")
        backend = new_backend(root / "sandboxes", root / "store")
        try:
            return cls(backend, spec, await backend.create(spec))
        except BaseException:
            await backend.close()
            raise

    async def apply(self, turn: Turn) -> None:
        result = await self._sandbox.exec(turn.command(), EXEC_TIMEOUT_S)
        if result.exit_code != 0:
            raise RuntimeError(f"a turn failed in its sandbox: {result.output}")

    async def freeze_and_harvest(self) -> tuple[float, float]:
        """The two halves of `LocalSandbox.snapshot`: what the sandbox has to stand still for, and the rest."""
        began = time.perf_counter()
        frozen = await self._in_thread(partial(self._sandbox._freeze, self._session.state()))
        if frozen.remounted:
            await self._session.reenter()
        frozen_s = time.perf_counter() - began
        began = time.perf_counter()
        self.last = snapshot = await self._in_thread(partial(self._files.harvest, frozen))
        harvested_s = time.perf_counter() - began
        if not frozen.remounted:
            raise RuntimeError("the snapshot was no freeze: something in the sandbox kept its mount in use")
        _check_changes(snapshot)
        return frozen_s, harvested_s

    async def snapshot(self) -> float:
        """All of it, as a rollout calls it."""
        began = time.perf_counter()
        self.last = await self._sandbox.snapshot()
        took_s = time.perf_counter() - began
        _check_changes(self.last)
        return took_s

    async def fork_mount(self) -> float:
        """The workspace of another sandbox in the state of the last snapshot: its mount, and nothing else."""
        assert self.last is not None
        files = self._new_files(self._backend)
        began = time.perf_counter()
        await self._in_thread(partial(files.restore, self.last, self._spec))
        took_s = time.perf_counter() - began
        await self._in_thread(files.destroy)
        return took_s

    async def fork(self) -> float:
        """Another sandbox in that state, isolated, its shell ready for a command."""
        assert self.last is not None
        began = time.perf_counter()
        sandbox = await self._backend.restore(self._spec, self.last)
        took_s = time.perf_counter() - began
        result = await sandbox.exec("echo here", EXEC_TIMEOUT_S)
        await sandbox.destroy()
        if result.output != "here\n":
            raise RuntimeError(f"a fork said {result.output!r}")
        return took_s

    async def restore_cold(self, root: Path) -> float:
        """The workspace of the last snapshot in another backend that has the store and the base, no other layer."""
        assert self.last is not None
        cold = new_backend(root, self._backend.store.path)
        try:
            base = self._new_files(cold)
            await self._in_thread(partial(base.create, self._spec))
            files = self._new_files(cold)
            began = time.perf_counter()
            await self._in_thread(partial(files.restore, self.last, self._spec))
            took_s = time.perf_counter() - began
            for each in (files, base):
                await self._in_thread(each.destroy)
            return took_s
        finally:
            await cold.close()

    async def close(self) -> None:
        await self._backend.close()

    def _new_files(self, backend: LocalBackend) -> OverlayFiles:
        self._places += 1
        return backend._new_files(backend.root / f"place{self._places}")  # type: ignore[return-value]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._backend._io, work)


def new_backend(root: Path, store_dir: Path) -> LocalBackend:
    """The overlay backend; raises SandboxFailure, which says why, where it does not work here."""
    root.mkdir(parents=True)
    isolation = choose_isolation("bubblewrap")
    return choose_backend(
        "overlay", root, SnapshotStore(store_dir), isolation, setup_timeout_s=SETUP_TIMEOUT_S
    )


def _check_changes(snapshot: Snapshot) -> None:
    files = [change for change in snapshot.changes if change.path.endswith(".txt")]
    if len(files) != CHANGED_PATHS:
        raise RuntimeError(f"a snapshot holds {len(files)} changed files instead of {CHANGED_PATHS}")
