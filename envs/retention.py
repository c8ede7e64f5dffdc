"""Which snapshots are kept: those of rollouts that rest, until nobody will go on from them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from midstream.envs.errors import SnapshotError
from midstream.envs.protocol import Snapshot
from midstream.envs.store.store import SnapshotStore

# The owner of the pins of rollouts that rest.
RESTING = "resting"
# How often what was forgotten is swept out of the store, at most.
SWEEP_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Retention:
    """Pins and drops snapshots of one store, off the event loop.

    Nothing else of the layer deletes a snapshot by itself: what a killed job leaves stays until
    `midstream sandbox prune --snapshots`.
    """

    def __init__(
        self, store: SnapshotStore, *, keeps_all: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self._keeps_all = keeps_all
        self._clock = clock
        self._swept_at = clock()
        self._dropped = 0
        self._thread = ThreadPoolExecutor(1, "midstream-retention")

    async def keep(self, snapshot: Snapshot) -> None:
        """Has the snapshot outlast what its rollout rests through. Raises SnapshotError."""
        await self._blocking(self.store.pin, [snapshot], RESTING)

    async def forget(self, snapshots: Sequence[Snapshot]) -> None:
        """Drops snapshots that nobody will go on from; their contents go a while later."""
        if self._keeps_all or not snapshots:
            return
        self._dropped += len(snapshots)
        await self._blocking(self.store.delete, snapshots, RESTING)
        if self._clock() - self._swept_at > SWEEP_S:
            self._swept_at = self._clock()
            self._thread.submit(self._sweep)

    async def close(self) -> None:
        """Sweeps once more, and ends."""
        if self._dropped:
            await self._blocking(self._sweep)
        await asyncio.to_thread(self._thread.shutdown)

    def _sweep(self) -> None:
        try:
            self.store.sweep()
        except SnapshotError as error:
            # What was not freed now is freed by the next one.
            _logger.warning("the snapshot store could not be swept: %s", error)

    async def _blocking(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))
