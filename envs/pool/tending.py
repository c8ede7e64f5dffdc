"""The chores of a pool, each a task of the pool's loop that does it again and again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from midstream.envs.errors import EnvironmentFailure

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chore:
    """What is done at once, then every so often, and sooner where the event is set."""

    run: Callable[[], Awaitable[None]]
    every_s: float
    sooner: asyncio.Event | None = None


class Tending:
    """Started when made; needs a running loop."""

    def __init__(self, *chores: Chore) -> None:
        self._tasks = [asyncio.create_task(_repeat(chore)) for chore in chores]

    async def stop(self) -> None:
        """Ends them, and waits for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _repeat(chore: Chore) -> None:
    while True:
        try:
            await chore.run()
        except (EnvironmentFailure, OSError) as failure:
            # A file server that is away for a while, say; what is due is done next time.
            _logger.warning("%s: %s", chore.run.__qualname__, failure)
        except Exception:
            # Leases must expire and slots be counted, whatever else is wrong.
            _logger.exception("%s", chore.run.__qualname__)
        if chore.sooner is None:
            await asyncio.sleep(chore.every_s)
            continue
        try:
            async with asyncio.timeout(chore.every_s):
                await chore.sooner.wait()
        except TimeoutError:
            continue
