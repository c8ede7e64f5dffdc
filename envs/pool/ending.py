"""The end of sandboxes: their slots come back whatever happens, and nobody's cancellation leaves one behind."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from midstream.envs.errors import SandboxFailure
from midstream.envs.pool.limits import Slot
from midstream.envs.pool.metrics import PoolCounters
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.sandboxes.protocol import Sandbox

# How often a sandbox that would not go is asked, all in all.
DESTROY_ATTEMPTS = 4

_logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Live:
    """A sandbox that exists, and the slot that it takes."""

    sandbox: Sandbox
    slot: Slot


class Endings:
    """Destroys sandboxes, and owns what runs on without the caller that began it."""

    def __init__(self, settings: PoolSettings, counters: PoolCounters) -> None:
        self._settings = settings
        self._counters = counters
        self._tasks: set[asyncio.Task[Any]] = set()
        # Slots of creations whose callers are gone.
        self._busy: set[Slot] = set()
        # Sandboxes that would not go, with how often they were asked.
        self._undestroyed: list[tuple[Sandbox, int]] = []

    async def destroy(self, live: Live) -> None:
        """Ends a sandbox and gives its slot back; a cancelled caller does not stop it.

        One that will not go is asked again by `retry`; its slot is free nevertheless.
        """
        await asyncio.shield(self.background(self._end(live.sandbox, live.slot)))

    def destroy_later(self, live: Live) -> None:
        """`destroy` without waiting for it."""
        self.background(self._end(live.sandbox, live.slot))

    def background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Runs to its end before `close` returns, whoever waits for it or not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def end_when_made(
        self, making: "asyncio.Task[Sequence[Sandbox | SandboxFailure]]", slots: Sequence[Slot]
    ) -> None:
        """Destroys what comes of a creation whose caller is gone, each in its slot."""
        self._busy.update(slots)
        making.add_done_callback(lambda _: self._end_made(making, slots))

    def release_unless_busy(self, slot: Slot) -> None:
        if slot not in self._busy:
            slot.release()

    async def retry(self) -> None:
        """Asks once more what would not go."""
        waiting, self._undestroyed = self._undestroyed, []
        for sandbox, attempts in waiting:
            await self._end(sandbox, None, attempts)

    async def close(self) -> None:
        """Waits for everything that is on its way, and tries once more what would not go."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.retry()

    def _end_made(
        self, making: "asyncio.Task[Sequence[Sandbox | SandboxFailure]]", slots: Sequence[Slot]
    ) -> None:
        self._busy.difference_update(slots)
        failed = making.cancelled() or making.exception() is not None
        made = [None] * len(slots) if failed else making.result()
        for each, slot in zip(made, slots, strict=True):
            if each is None or isinstance(each, SandboxFailure):
                slot.release()
            else:
                self.background(self._end(each, slot))

    async def _end(self, sandbox: Sandbox, slot: Slot | None, attempts: int = 0) -> None:
        try:
            async with asyncio.timeout(self._settings.destroy_timeout_s):
                await sandbox.destroy()
        except Exception as error:  # noqa: BLE001 (whatever a backend raises, the slot must come back)
            self._counters.add("failures_destroy")
            _logger.warning("sandbox %s is not destroyed: %s", sandbox.id, str(error) or type(error).__name__)
            if attempts + 1 < DESTROY_ATTEMPTS:
                self._undestroyed.append((sandbox, attempts + 1))
        finally:
            if slot is not None:
                slot.release()

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Whoever waits for it is told; where nobody does, a failure has been counted or logged.
            task.exception()
