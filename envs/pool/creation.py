"""One creation, from the slot to the live sandbox, with all that can go wrong on the way.

A creation that has been handed to the backend is never cancelled by its caller: nobody would know whether a
sandbox came of it. It goes on without its caller, keeps its slot, and what comes of it is destroyed.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from midstream.envs.errors import EnvironmentFailure, SandboxFailure, SnapshotError
from midstream.envs.pool.breaker import Admission, Breaker
from midstream.envs.pool.ending import Endings, Live
from midstream.envs.pool.limits import Limits, Relieve, Slot
from midstream.envs.pool.metrics import PoolCounters
from midstream.envs.pool.retry import retrying
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.sandboxes.protocol import Sandbox

_logger = logging.getLogger(__name__)

Make = Callable[[], Awaitable[Sandbox]]
Made = Sandbox | SandboxFailure
MakeMany = Callable[[int], Awaitable[Sequence[Made]]]


class Creations:
    """Makes sandboxes within the limits."""

    def __init__(
        self, limits: Limits, endings: Endings, settings: PoolSettings, counters: PoolCounters
    ) -> None:
        self.breaker = Breaker(settings)
        self._limits = limits
        self._endings = endings
        self._settings = settings
        self._counters = counters
        self._in_flight = asyncio.Semaphore(settings.creations_in_flight)
        self._quota_turn = asyncio.Lock()
        self._breaker_moved: asyncio.Future[None] | None = None

    async def create(self, make: Make, relieve: Relieve | None = None) -> Live:
        """Takes a slot and calls `make`, again where that helps. `relieve` frees an idle sandbox's slot.

        Raises SandboxFailure at the deadline or where trying again is of no use, and what else `make` raises.
        """
        deadline = self.deadline()
        with self._counting():
            slot = await self._limits.take(self._settings.acquire_timeout_s, relieve)
        return await self.fill(slot, make, deadline, relieve)

    async def fill(self, slot: Slot, make: Make, deadline: float, relieve: Relieve | None = None) -> Live:
        """`create` with a slot that was taken before; gives it back where nothing comes of it."""

        async def make_one(_: int) -> Sequence[Made]:
            return [await make()]

        async def attempt(admission: Admission) -> Live:
            [made] = await self._attempt(make_one, [slot], admission)
            if isinstance(made, SandboxFailure):
                raise made
            return made

        try:
            return await retrying(
                partial(self._ready, 1, deadline),
                attempt,
                self._settings,
                deadline=deadline,
                clock=time.monotonic,
                sleep=asyncio.sleep,
                until_release=partial(self._until_release, relieve),
                draw=random.random,
            )
        except asyncio.CancelledError:
            # Where the backend is at work, the slot is that of what comes of it.
            self._endings.release_unless_busy(slot)
            raise
        except BaseException:
            slot.release()
            raise

    async def fill_all(
        self, slots: Sequence[Slot], make_many: MakeMany, deadline: float
    ) -> list[Live | SandboxFailure]:
        """One attempt to fill all slots by one call. The slot of what failed stays with the caller."""
        try:
            return await self._attempt(make_many, slots, await self._ready(len(slots), deadline))
        except SandboxFailure as failure:
            return [failure] * len(slots)
        except asyncio.CancelledError:
            for slot in slots:
                self._endings.release_unless_busy(slot)
            raise
        except BaseException:
            for slot in slots:
                slot.release()
            raise

    def deadline(self) -> float:
        return time.monotonic() + self._settings.acquire_timeout_s

    async def _ready(self, count: int, deadline: float) -> Admission:
        """When the breaker and the rate allow it. Raises SandboxFailure where that is after the deadline."""
        with self._counting():
            admission = await self._admitted(deadline)
            try:
                for _ in range(count):
                    await self._limits.pace(max(0.0, deadline - time.monotonic()))
            except BaseException:
                self._abandon(admission)
                raise
        return admission

    async def _attempt(
        self, make_many: MakeMany, slots: Sequence[Slot], admission: Admission
    ) -> list[Live | SandboxFailure]:
        try:
            made = await self._handed_over(make_many, slots)
        except SandboxFailure as failure:
            self._count(failure)
            self._conclude(admission, failure)
            raise
        except SnapshotError:
            # The backend looked for it: it is there.
            self._conclude(admission, None)
            self._counters.add("failures_snapshot")
            raise
        except EnvironmentFailure as error:
            passing = SandboxFailure(str(error), "transient")
            self._count(passing)
            self._conclude(admission, passing)
            raise passing from error
        except BaseException:
            self._abandon(admission)
            raise
        failures = [each for each in made if isinstance(each, SandboxFailure)]
        for each in failures:
            self._count(each)
        self._conclude(admission, failures[0] if len(failures) == len(made) else None)
        self._counters.add("starts", len(made) - len(failures))
        return [
            each if isinstance(each, SandboxFailure) else Live(each, slot)
            for each, slot in zip(made, slots, strict=True)
        ]

    async def _handed_over(self, make_many: MakeMany, slots: Sequence[Slot]) -> Sequence[Made]:
        """What the backend makes of it; without us where we are cancelled meanwhile."""
        await self._in_flight.acquire()
        task = self._endings.background(self._make_in_time(make_many, len(slots)))
        task.add_done_callback(lambda _: self._in_flight.release())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._endings.end_when_made(task, slots)
            raise

    async def _make_in_time(self, make_many: MakeMany, count: int) -> Sequence[Made]:
        timeout_s = self._settings.create_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await make_many(count)
        except TimeoutError as error:
            raise SandboxFailure(f"a sandbox did not come up within {timeout_s:g} s") from error

    async def _until_release(self, relieve: Relieve | None, timeout_s: float) -> None:
        """Waits for the provider's quota: one creation goes for each sandbox that is given back."""
        if relieve is not None and await relieve():
            return
        try:
            async with asyncio.timeout(timeout_s), self._quota_turn:
                await self._limits.until_release(timeout_s)
        except TimeoutError:
            return

    async def _admitted(self, deadline: float) -> Admission:
        """The breaker's leave to create. Raises SandboxFailure where no probe can be before the deadline."""
        while (admission := self.breaker.admit(now := time.monotonic())) is None:
            wait_s = self.breaker.wait_s(now)
            if now + wait_s >= deadline:
                raise SandboxFailure(
                    f"creations have failed so often that none is tried for {wait_s:.1f} s, longer than this one "
                    f"may wait ({max(deadline - now, 0):.1f} s): look after the sandboxes' host or provider, "
                    "whose failures are in the log, or raise acquire_timeout_s",
                    "transient",
                    wait_s,
                )
            if self._breaker_moved is None:
                self._breaker_moved = asyncio.get_running_loop().create_future()
            # With the probe on its way, until it is back.
            await asyncio.wait([self._breaker_moved], timeout=wait_s or deadline - now)
        return admission

    def _conclude(self, admission: Admission, failure: SandboxFailure | None) -> None:
        now = time.monotonic()
        before = self.breaker.state(now)
        self.breaker.record(admission, failure is not None and failure.kind == "transient", now)
        if self.breaker.state(now) == "open" and before != "open":
            self._counters.add("breaker_opened")
            _logger.warning(
                "creations fail: none but a probe in %.1f s; %s", self.breaker.wait_s(now), failure
            )
        self._tell_of_breaker()

    def _abandon(self, admission: Admission) -> None:
        self.breaker.abandon(admission)
        self._tell_of_breaker()

    def _tell_of_breaker(self) -> None:
        moved, self._breaker_moved = self._breaker_moved, None
        if moved is not None:
            moved.set_result(None)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except SandboxFailure as failure:
            self._count(failure)
            raise

    def _count(self, failure: SandboxFailure) -> None:
        self._counters.add(f"failures_{failure.kind}")
