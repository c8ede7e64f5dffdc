"""Parks sandboxes of rollouts that were cut off, and gives them back in exactly the state they were parked in."""

import asyncio
import logging
from contextlib import suppress

from midstream.envs.errors import AgentFault, EnvironmentFailure
from midstream.envs.pool.ending import Endings, Live
from midstream.envs.pool.hot import HotSandboxes, Parked
from midstream.envs.pool.metrics import PoolCounters
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.protocol import Snapshot

# How long stopping, continuing and comparing a parked sandbox may take before it counts as dead.
ANSWER_TIMEOUT_S = 30.0

_logger = logging.getLogger(__name__)


class Parking:
    """The hot sandboxes with their comings and goings."""

    def __init__(self, endings: Endings, settings: PoolSettings, counters: PoolCounters) -> None:
        self.hot = HotSandboxes(settings.hot, settings.hot_bytes)
        self._endings = endings
        self._counters = counters

    async def park(self, live: Live, snapshot: Snapshot) -> bool:
        """Keeps a sandbox that is in the state of the snapshot, or destroys it; whether it is kept."""
        if not self.hot.admits(snapshot) or not await self._stopped(live):
            await self._spill(live)
            return False
        spilled = self.hot.add(Parked(live, snapshot))
        for each in spilled:
            await self._spill(each.live)
        return all(each.live is not live for each in spilled)

    async def take(self, snapshot: Snapshot) -> Live | None:
        """The sandbox parked under the snapshot, going on, if its workspace is still in that state."""
        while (parked := self.hot.take(snapshot)) is not None:
            try:
                as_parked = await self._is_as_parked(parked)
            except BaseException:
                self._endings.destroy_later(parked.live)
                raise
            if as_parked:
                self._counters.add("hot_hits")
                return parked.live
            self._endings.destroy_later(parked.live)
        self._counters.add("hot_misses")
        return None

    async def spill_oldest(self) -> bool:
        """Destroys the one parked longest ago, since its slot is needed; False where there is none."""
        parked = self.hot.oldest()
        if parked is None:
            return False
        await self._spill(parked.live)
        return True

    async def discard(self, snapshot: Snapshot) -> bool:
        """Destroys what is parked under the snapshot."""
        parked = self.hot.take(snapshot)
        if parked is None:
            return False
        await self._endings.destroy(parked.live)
        return True

    def close(self) -> list[Live]:
        """Gives up all that is parked."""
        ended = []
        while (parked := self.hot.oldest()) is not None:
            ended.append(parked.live)
        return ended

    async def _spill(self, live: Live) -> None:
        self._counters.add("spilled")
        await self._endings.destroy(live)

    async def _stopped(self, live: Live) -> bool:
        """Whether it lives, with nothing running in it where the backend can pause."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await live.sandbox.pause()
        except NotImplementedError:
            # What runs on may change files; `take` notices.
            return True
        except (EnvironmentFailure, TimeoutError) as failure:
            _logger.info("sandbox %s cannot be parked: %s", live.sandbox.id, str(failure) or "no answer")
            return False
        return True

    async def _is_as_parked(self, parked: Parked) -> bool:
        """Background processes may have gone on between the snapshot and the pause, or during both."""
        sandbox = parked.live.sandbox
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                with suppress(NotImplementedError):
                    await sandbox.resume()
                now = await sandbox.snapshot()
        except (AgentFault, EnvironmentFailure, TimeoutError) as failure:
            _logger.info("parked sandbox %s is dead: %s", sandbox.id, str(failure) or "no answer")
            return False
        if now.id != parked.snapshot.id:
            _logger.info("parked sandbox %s has changed since snapshot %s", sandbox.id, parked.snapshot.id)
            return False
        return True
