"""Giving back what a rollout had; a failure to do so changes nothing about the rollout."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.protocol import EnvironmentFactory, Snapshot

# A sandbox that is ended waits for what its environment is about as well, and a snapshot of which nobody hears is
# given up by nobody.
_UNDER_WAY_S = 10.0

_logger = logging.getLogger(__name__)


async def released(closing: Awaitable[None]) -> None:
    """Await the release of an environment; where it fails, what is left is the environments' to report."""
    try:
        await closing
    except EnvironmentFailure as failure:
        _logger.warning("an environment could not be released: %s", failure)


async def over(work: asyncio.Task[None]) -> None:
    """Await ``work``, which is cancelled where it takes long; then it is over, whatever came of it."""
    await asyncio.wait([work], timeout=_UNDER_WAY_S)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def give_up(environments: EnvironmentFactory, snapshots: Iterable[Snapshot]) -> None:
    """Tell the environments that nobody will resume from these snapshots."""
    left = list(snapshots)
    forget = getattr(environments, "forget", None)
    if forget is not None and left:
        await released(forget(left))
