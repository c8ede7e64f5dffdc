"""The local backends: sandboxes that are processes of this machine, with their snapshots in a store."""

import asyncio
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from midstream.envs.errors import EnvironmentFailure, SandboxFailure, SnapshotError
from midstream.envs.ownership import claims
from midstream.envs.ownership.owners import this_process
from midstream.envs.protocol import Change, Snapshot
from midstream.envs.sandboxes.files import Files
from midstream.envs.sandboxes.isolation import Isolation
from midstream.envs.sandboxes.local import LocalSandbox
from midstream.envs.sandboxes.protocol import Capabilities, SandboxSpec
from midstream.envs.store.store import SnapshotStore

# Files are read and written by threads: four halve the time of one, more gain nothing. Sandboxes begin and end on
# threads of their own, so that a crowd of snapshots does not keep a new rollout waiting.
FILE_THREADS = 4
SETUP_TIMEOUT_S = 10.0
# What another sandbox's end makes good: descriptors, processes, memory, disk.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)

P = ParamSpec("P")
T = TypeVar("T")


class LocalBackend:
    """Makes sandboxes below one folder; `new_files` says how the workspace of each is kept."""

    def __init__(
        self,
        name: str,
        root: Path,
        store: SnapshotStore,
        isolation: Isolation,
        new_files: Callable[[Path], Files[Any]],
        *,
        forks_by_mount: bool = False,
        setup_timeout_s: float = SETUP_TIMEOUT_S,
        forget: Callable[[Sequence[Snapshot]], list[Snapshot]] = list,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`forget` drops what the workspaces share for these snapshots, and returns those that the store may
        drop; `closed` gives back all of it.
        """
        self.name = name
        self.root = root
        self.store = store
        self.capabilities = Capabilities(
            isolation=isolation.name, limits=isolation.limits_in_words(), forks_by_mount=forks_by_mount
        )
        self._isolation = isolation
        self._new_files = new_files
        self._setup_timeout_s = setup_timeout_s
        self._forget = forget
        self._closed = closed
        self._io: Executor = ThreadPoolExecutor(FILE_THREADS, "midstream-files")
        self._begin_and_end: Executor = ThreadPoolExecutor(FILE_THREADS, "midstream-sandboxes")
        self._live: dict[str, LocalSandbox] = {}

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        return await self._begun(spec, None)

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> LocalSandbox:
        return await self._begun(spec, snapshot)

    async def fork(
        self, spec: SandboxSpec, snapshot: Snapshot, count: int
    ) -> Sequence[LocalSandbox | SandboxFailure]:
        begun = [asyncio.ensure_future(self._begun(spec, snapshot)) for _ in range(count)]
        try:
            return [_fork(result) for result in await asyncio.gather(*begun, return_exceptions=True)]
        except BaseException:
            for sandbox in await asyncio.gather(*begun, return_exceptions=True):
                if isinstance(sandbox, LocalSandbox):
                    await sandbox.destroy()
            raise

    async def diff(self, before: Snapshot | None, after: Snapshot) -> tuple[Change, ...]:
        return await self._blocking(self.store.diff, before, after)

    async def export_snapshot(self, snapshot: Snapshot, to: Path) -> None:
        await self._blocking(self.store.export_snapshot, snapshot, to)

    async def import_snapshot(self, source: Path) -> Snapshot:
        return await self._blocking(self.store.import_snapshot, source)

    async def pin(self, snapshot: Snapshot, owner: str) -> None:
        await self._blocking(self.store.pin, [snapshot], owner)

    async def forget(self, snapshots: Sequence[Snapshot], owner: str) -> None:
        await self._blocking(self._drop, snapshots, owner)

    async def sweep(self) -> int:
        return (await self._blocking(self.store.sweep)).bytes

    async def gc(self, keep: Iterable[str] = ()) -> int:
        return (await self._blocking(self.store.collect, tuple(keep))).bytes

    async def close(self) -> None:
        destroyed = await asyncio.gather(
            *(sandbox.destroy() for sandbox in list(self._live.values())), return_exceptions=True
        )
        try:
            await self._blocking(self._closed)
        except OSError as error:
            raise EnvironmentFailure(
                f"the {self.name} backend left something in {self.root}: {error}"
            ) from error
        finally:
            self._io.shutdown(wait=False)
            self._begin_and_end.shutdown(wait=False)
        for failure in destroyed:
            if failure is not None:
                raise failure

    async def _begun(self, spec: SandboxSpec, snapshot: Snapshot | None) -> LocalSandbox:
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        sandbox = LocalSandbox(
            name,
            spec,
            self._new_files(self.root / name),
            self._isolation,
            self._io,
            self._begin_and_end,
            setup_timeout_s=self._setup_timeout_s,
            gone=lambda: self._gone(name),
        )
        self._live[name] = sandbox
        try:
            label = spec.owner or this_process().label
            await sandbox.begin(snapshot, partial(claims.claim, self.root / name, label))
        except BaseException as error:
            await sandbox.destroy()
            if isinstance(error, EnvironmentFailure) and not isinstance(
                error, (SandboxFailure, SnapshotError)
            ):
                raise SandboxFailure(str(error), "quota" if _is_exhausted(error) else "transient") from error
            raise
        return sandbox

    def _drop(self, snapshots: Sequence[Snapshot], owner: str) -> None:
        self.store.delete(self._forget(snapshots), owner)

    def _gone(self, name: str) -> None:
        del self._live[name]
        # What could not be removed stays claimed, so that a reaper finds it.
        if not (self.root / name).exists():
            claims.release(self.root / name)

    async def _blocking(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._io, partial(work, *args, **kwargs))


def _fork(result: LocalSandbox | BaseException) -> LocalSandbox | SandboxFailure:
    if isinstance(result, (LocalSandbox, SandboxFailure)):
        return result
    if isinstance(result, EnvironmentFailure) and not isinstance(result, SnapshotError):
        failure = SandboxFailure(str(result), "permanent")
        failure.__cause__ = result
        return failure
    raise result


def _is_exhausted(error: BaseException | None) -> bool:
    """Whether the machine ran out of something, as far as the causes of the error say."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            return True
        error = error.__cause__
    return False
