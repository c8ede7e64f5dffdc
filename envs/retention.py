"""Which snapshots are kept: those of rollouts that rest, until nobody will go on from them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from midstream.envs.errors import SnapshotError
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import Backend

# The owner of the pins of rollouts that rest.
RESTING = "resting"
# How often what was forgotten is swept out of the store, at most.
SWEEP_S = 60.0

_logger = logging.getLogger(__name__)


class Retention:
    """Pins and drops snapshots of one backend.

    Nothing else of the layer deletes a snapshot by itself: what a killed job leaves stays until its
    folder goes or somebody collects it.
    """

    def __init__(
        self, backend: Backend, *, keeps_all: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._keeps_all = keeps_all
        self._clock = clock
        self._swept_at = clock()
        self._forgot = False
        self._sweeping: asyncio.Task[None] | None = None

    async def keep(self, snapshot: Snapshot) -> None:
        """Has the snapshot outlast what its rollout rests through. Raises SnapshotError."""
        await self._backend.pin(snapshot, RESTING)

    async def forget(self, snapshots: Sequence[Snapshot]) -> None:
        """Drops snapshots that nobody will go on from; their contents go a while later. Raises SnapshotError."""
        if self._keeps_all or not snapshots:
            return
        self._forgot = True
        await self._backend.forget(snapshots, RESTING)
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
