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

    The work is expected to wait for the server by itself. What ``restart`` raises ends the work.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_watch(server, restart))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _watch(server: Server, restart: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_WATCH_PERIOD_S)
        if not server.alive():
            await asyncio.to_thread(restart)
