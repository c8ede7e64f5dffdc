"""Keeps the engine's server alive while work depends on it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

_WATCH_PERIOD_S = 0.5

Result = TypeVar("Result")


class Server(Protocol):
    """What supervision needs to know of a server."""

    def alive(self) -> bool: ...


async def supervised(
    work: Coroutine[Any, Any, Result], server: Server, restart: Callable[[], None]
) -> Result:
    """Await ``work``; whenever the server dies meanwhile, call ``restart`` in a thread.

    The work is expected to wait for the server by itself. What ``restart`` raises ends the work. A restart
    that has begun is over before this returns, so that nobody else has to deal with half a server.
    """
    working = asyncio.create_task(work)
    watch = _Watch(server, restart)
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
        await watch.settle()


class _Watch:
    def __init__(self, server: Server, restart: Callable[[], None]) -> None:
        self._server = server
        self._restart = restart
        self._restarting: asyncio.Future[None] | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            if not self._server.alive():
                self._restarting = asyncio.ensure_future(asyncio.to_thread(self._restart))
                await asyncio.shield(self._restarting)

    async def settle(self) -> None:
        """Wait for the thread of a restart, which cannot be cancelled; raise what it raised."""
        if self._restarting is not None:
            await self._restarting
