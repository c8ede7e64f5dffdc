"""How long a rollout waits: for its environment once the host has aborted, and for anything until it is stopped."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

# How often a wait looks whether the host has called the batch complete. Hosts offer a flag, not an event.
ABORT_POLL_S = 0.05

Result = TypeVar("Result")


class Cut(Exception):
    """The host called the batch complete while the environment was at work."""


class Stuck(Exception):
    """The play has lasted longer than its deadline."""


class Stopped(Exception):
    """Nobody wants the result of this play."""


class Patience:
    """The waits of one play.

    Once ``aborted()`` is true the environment gets ``abort_grace_s`` more. From ``begin`` on, the play as a
    whole gets ``deadline_s``, without end where that is None. After ``stop`` it gets nothing.
    """

    def __init__(self, aborted: Callable[[], bool], abort_grace_s: float, deadline_s: float | None) -> None:
        self._aborted = aborted
        self._abort_grace_s = abort_grace_s
        self._deadline_s = deadline_s
        self._ends_at: float | None = None
        self._stopped = False
        self._at_engine: asyncio.Timeout | None = None

    def begin(self) -> None:
        """Let the time to the deadline run from now."""
        if self._deadline_s is not None:
            self._ends_at = asyncio.get_running_loop().time() + self._deadline_s

    def stop(self) -> None:
        """End all waits: one for the engine now, one for the environment within ``ABORT_POLL_S``."""
        self._stopped = True
        # One that expires anyway cannot be moved.
        if self._at_engine is not None and not self._at_engine.expired():
            self._at_engine.reschedule(asyncio.get_running_loop().time())

    def check(self) -> None:
        """Raise Stopped after a stop, Stuck where the deadline is over."""
        if self._stopped:
            raise Stopped
        if self._ends_at is not None and asyncio.get_running_loop().time() >= self._ends_at:
            raise Stuck(f"played for more than {self._deadline_s:g} s")

    async def for_engine(self, work: Awaitable[Result]) -> Result:
        """Await a generation, which the host itself aborts; raises Stopped or Stuck, and then it is cancelled."""
        ends_at = 0.0 if self._stopped else self._ends_at
        try:
            async with asyncio.timeout_at(ends_at) as self._at_engine:
                return await work
        except TimeoutError:
            self.check()
            raise
        finally:
            self._at_engine = None

    async def for_environment(self, work: Awaitable[Result]) -> Result:
        """Await the environment; raises Cut, Stopped or Stuck; then ``work`` is cancelled and over."""
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        cut_at: float | None = None
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=ABORT_POLL_S)
                if done:
                    return task.result()
                if cut_at is None and self._aborted():
                    cut_at = loop.time() + self._abort_grace_s
                if cut_at is not None and loop.time() >= cut_at:
                    raise Cut
                self.check()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
