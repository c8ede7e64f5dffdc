"""A sandbox on this machine: a shell session over a workspace whose files some backend keeps."""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from midstream.envs.errors import EnvironmentFailure, SnapshotError
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.beneath import read_beneath, write_beneath
from midstream.envs.sandboxes.files import Files, Frozen
from midstream.envs.sandboxes.isolation import Isolation
from midstream.envs.sandboxes.protocol import ExecResult, SandboxSpec
from midstream.envs.sandboxes.session import ShellSession

P = ParamSpec("P")
T = TypeVar("T")


class LocalSandbox:
    """One live sandbox, made by a local backend. A single coroutine at a time may use it.

    A call that fails or is cancelled leaves it unusable, since nobody knows how far it got: destroy it and go
    on from its last snapshot in another one. But a snapshot that could not be taken may be tried again, and a file
    that is not there, or cannot be written, spoils nothing.
    """

    def __init__(
        self,
        name: str,
        spec: SandboxSpec,
        files: Files[Any],
        isolation: Isolation,
        io: Executor,
        begin_and_end: Executor,
        *,
        setup_timeout_s: float,
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        """`io` and `begin_and_end` run what blocks; `gone` is called once when nothing of the sandbox is left."""
        self.id = name
        self._spec = spec
        self._files = files
        self._owner = isolation.owner
        self._io = io
        self._begin_and_end = begin_and_end
        self._gone = gone
        self._session = ShellSession(
            files.directory,
            isolation,
            workdir=spec.workdir,
            max_output_bytes=spec.max_output_bytes,
            setup_timeout_s=setup_timeout_s,
            attach=files.attach,
        )
        self._usable = True
        self._work: asyncio.Future[Any] | None = None
        self._destroying: asyncio.Task[None] | None = None

    async def begin(self, snapshot: Snapshot | None, claim: Callable[[], None]) -> None:
        """Makes the workspace, new or that of a snapshot, and starts the shell. For its backend.

        `claim` comes before all else, on the thread that makes the files.
        """
        with self._used():
            restored = await self._on(self._begin_and_end, self._make, snapshot, claim)
            if restored is not None:
                self._session.set_state(restored)
            await self._session.start()

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        with self._used():
            return await self._session.exec(command, timeout_s)

    async def exec_fresh(self, command: str, timeout_s: float) -> ExecResult:
        with self._used():
            return await self._session.exec_fresh(command, timeout_s)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """The content of a regular file. Raises FileNotFoundError, or ValueError where it is none or too long."""
        with self._used(may_fail=(OSError, ValueError)):
            await self._session.start()
            return await self._blocking(self._within, read_beneath, path, max_bytes)

    async def write_file(self, path: str, content: bytes) -> None:
        """Writes a file, with the folders above it. Raises OSError where something else is in the way."""
        with self._used(may_fail=(OSError, ValueError)):
            await self._session.start()
            await self._blocking(self._within, write_beneath, path, content, self._owner)

    async def snapshot(self) -> Snapshot:
        with self._used(may_fail=SnapshotError):
            frozen = await self._blocking(self._freeze, self._session.state())
            if frozen.remounted:
                await self._session.reenter()
            return await self._blocking(self._files.harvest, frozen)

    async def restore(self, snapshot: Snapshot) -> None:
        with self._used():
            await self._session.end()
            self._session.set_state(await self._blocking(self._files.restore, snapshot, self._spec))
            await self._session.start()

    async def pause(self) -> None:
        await self._blocking(self._session.pause)

    async def resume(self) -> None:
        await self._blocking(self._session.resume)

    @property
    def alive(self) -> bool:
        """Whether its shell still runs."""
        return self._destroying is None and self._session.alive

    async def destroy(self) -> None:
        if self._destroying is None or _failed(self._destroying):
            self._usable = False
            self._destroying = asyncio.create_task(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        try:
            await self._session.close()
        finally:
            if self._work is not None:
                await asyncio.wait([self._work])
            try:
                await self._on(self._begin_and_end, self._files.destroy)
            except OSError as error:
                raise EnvironmentFailure(f"cannot remove sandbox {self.id}: {error}") from error
        self._gone()

    def _make(self, snapshot: Snapshot | None, claim: Callable[[], None]) -> dict[str, str] | None:
        claim()
        if snapshot is not None:
            return self._files.restore(snapshot, self._spec)
        self._files.create(self._spec)
        return None

    def _freeze(self, state: dict[str, str]) -> Frozen:
        with self._session.stopped() as running:
            return self._files.freeze(state, running)

    def _within(self, work: Callable[..., T], *args: Any) -> T:
        root = self._files.open(self._session.init_pid)
        try:
            return work(root, *args)
        finally:
            os.close(root)

    async def _blocking(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._on(self._io, work, *args, **kwargs)

    async def _on(self, threads: Executor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future = asyncio.get_running_loop().run_in_executor(threads, partial(work, *args, **kwargs))
        # A cancelled caller does not stop the thread; `destroy` waits for it.
        self._work = future
        return await asyncio.shield(future)

    @contextmanager
    def _used(self, may_fail: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Holds the sandbox for one call; whatever ends that early leaves it unusable."""
        if not self._usable:
            raise EnvironmentFailure(
                f"sandbox {self.id} is destroyed, in use, or failed or was cancelled in a call: destroy it "
                "and go on from its last snapshot"
            )
        self._usable = False
        try:
            yield
        except may_fail:
            self._usable = self._destroying is None
            raise
        self._usable = self._destroying is None


def _failed(task: "asyncio.Task[None]") -> bool:
    """Whether it has ended without doing what it was to do, so that it can be tried again."""
    return task.done() and (task.cancelled() or task.exception() is not None)
