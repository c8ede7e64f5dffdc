"""Which snapshots are kept: those of rollouts that rest, until nobody will go on from them."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from midstream.envs.errors import SnapshotError
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import Backend
from midstream.envs.store.store import SnapshotStore

# How often what was forgotten is swept out of the store, at most.
SWEEP_S = 60.0

_logger = logging.getLogger(__name__)


def resting(run_dir: Path | None) -> str:
    """The owner of the pins of rollouts that rest: their run, since runs may share a store."""
    return "resting" if run_dir is None else f"resting in {run_dir.resolve()}"


class Retention:
    """Pins and drops snapshots of one backend, in the name of ``owner``; ``owns_store``: of nobody else's.

    Nothing else of the layer deletes a snapshot by itself: what a killed job leaves stays until the next job
    of its run adopts it, its folder goes or somebody collects it.
    """

    def __init__(
        self,
        backend: Backend,
        store: SnapshotStore,
        *,
        owner: str,
        owns_store: bool,
        keeps_all: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._store = store
        self.owner = owner
        self._owns_store = owns_store
        self._keeps_all = keeps_all
        self._clock = clock
        self._swept_at = clock()
        self._forgot = False
        self._sweeping: asyncio.Task[None] | None = None

    async def keep(self, snapshot: Snapshot) -> None:
        """Has the snapshot outlast what its rollout rests through. Raises SnapshotError."""
        await self._backend.pin(snapshot, self.owner)

    def adopt(self, needed: Collection[str]) -> frozenset[str]:
        """Drops what the owner kept and does not need; returns what it needs and lacks. Raises SnapshotError."""
        if not self._keeps_all:
            kept = self._store.pins().get(self.owner, frozenset())
            self._store.delete(kept.difference(needed), self.owner)
            if self._owns_store:
                # With what a killed process had recorded and not pinned yet.
                self._store.collect(needed)
        return frozenset(key for key in needed if not self._store.has(key))

    async def forget(self, snapshots: Sequence[Snapshot]) -> None:
        """Drops snapshots that nobody will go on from; their contents go a while later. Raises SnapshotError."""
        if self._keeps_all or not snapshots:
            return
        self._forgot = True
        await self._backend.forget(snapshots, self.owner)
        idle = self._sweeping is None or self._sweeping.done()
        if idle and self._clock() - self._swept_at >= SWEEP_S:
            self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Sweeps once more."""
        if self._sweeping is not None:
            await self._sweeping
        if self._forgot:
            await self._sweep()

    async def _sweep(self) -> None:
        self._swept_at = self._clock()
        try:
            await self._backend.sweep()
        except SnapshotError as error:
            # What is not freed now is freed by the next one.
            _logger.warning("the snapshot store could not be swept: %s", error)
