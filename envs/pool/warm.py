"""Spares: sandboxes that are ready before anybody asks.

A base has spares from when it is first asked for, or named ahead. What is short is made in the background,
with slots that are free at the moment and never while somebody waits for one. A spare has to answer before it
is handed out, and now and then while it waits; one that does not is destroyed and replaced.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from midstream.envs.errors import EnvironmentFailure, SandboxFailure
from midstream.envs.pool.creation import Creations
from midstream.envs.pool.ending import Endings, Live
from midstream.envs.pool.limits import Limits, Slot
from midstream.envs.pool.metrics import PoolCounters
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.sandboxes.protocol import Backend, Sandbox, SandboxSpec

# A spare that says nothing for this long is dead.
ANSWER_TIMEOUT_S = 5.0
# How often spares that wait are asked.
CHECK_EVERY_S = 30.0
# Spares made at once: few, since they take their turns from those who wait for a sandbox.
MADE_AT_ONCE = 8
# After a failure, how long none is made.
PAUSE_S = 5.0

_logger = logging.getLogger(__name__)


@dataclass
class _Base:
    spec: SandboxSpec
    spares: list[Live] = field(default_factory=list)
    checked_s: float = 0.0


class Spares:
    """The spares of one pool; `refill` is to be called again and again."""

    def __init__(
        self,
        backend: Backend,
        creations: Creations,
        endings: Endings,
        limits: Limits,
        settings: PoolSettings,
        counters: PoolCounters,
    ) -> None:
        self._backend = backend
        self._creations = creations
        self._endings = endings
        self._limits = limits
        self._settings = settings
        self._counters = counters
        # By name, those asked for last at the end.
        self._bases: dict[str, _Base] = {}
        self._not_before_s = 0.0
        self.short = asyncio.Event()

    def __len__(self) -> int:
        return sum(len(base.spares) for base in self._bases.values())

    def want(self, spec: SandboxSpec) -> None:
        """Spares of this kind will be asked for; those of the base that nobody wanted for longest may go."""
        if self._settings.warm == 0 or spec.base is None:
            return
        base = self._bases.pop(spec.base, None)
        if base is None or base.spec != spec:
            self._drop(base)
            base = _Base(spec)
        self._bases[spec.base] = base
        while len(self._bases) > self._settings.warm_bases:
            self._drop(self._bases.pop(next(iter(self._bases))))
        self.short.set()

    def slot_came_free(self) -> None:
        """Time to make up for what is short."""
        if any(len(base.spares) < self._settings.warm for base in self._bases.values()):
            self.short.set()

    async def take(self, spec: SandboxSpec) -> Live | None:
        """A spare that answers, if there is one of exactly this kind."""
        self.want(spec)
        base = self._bases.get(spec.base or "")
        while base is not None and base.spares:
            spare = base.spares.pop(0)
            if await self._answers(spare):
                self._counters.add("warm_hits")
                return spare
        return None

    def least_wanted(self) -> Live | None:
        """A spare to give up where its slot is needed."""
        for base in self._bases.values():
            if base.spares:
                return base.spares.pop()
        return None

    async def refill(self) -> None:
        """Makes what is short, as far as slots are free, and asks those that have waited for a while."""
        self.short.clear()
        await self._check()
        if (
            time.monotonic() < self._not_before_s
            or self._creations.breaker.state(time.monotonic()) != "closed"
        ):
            return
        made = [asyncio.create_task(self._make(base, slot)) for base, slot in await self._startable()]
        try:
            if made:
                await asyncio.wait(made)
        finally:
            for task in made:
                task.cancel()
            await asyncio.gather(*made, return_exceptions=True)

    def close(self) -> list[Live]:
        """Ends the wish for spares; returns those there are."""
        spares = [spare for base in self._bases.values() for spare in base.spares]
        self._bases.clear()
        return spares

    async def _startable(self) -> list[tuple[_Base, Slot]]:
        """What to make now, of the base that was asked for last first."""
        found: list[tuple[_Base, Slot]] = []
        for base in reversed(list(self._bases.values())):
            for _ in range(self._settings.warm - len(base.spares)):
                if len(found) == MADE_AT_ONCE or self._limits.waiting:
                    return found
                slot = await self._limits.take_now()
                if slot is None:
                    return found
                found.append((base, slot))
        return found

    async def _make(self, base: _Base, slot: Slot) -> None:
        async def make(_: int) -> list[Sandbox | SandboxFailure]:
            return [await self._backend.create(base.spec)]

        deadline = time.monotonic() + self._settings.create_timeout_s
        [made] = await self._creations.fill_all([slot], make, deadline)
        if isinstance(made, SandboxFailure):
            slot.release()
            self._not_before_s = time.monotonic() + (made.retry_after_s or PAUSE_S)
            _logger.info("no spare of %s: %s", base.spec.base, made)
        elif self._bases.get(base.spec.base or "") is not base or self._limits.waiting:
            self._endings.destroy_later(made)
        else:
            base.spares.append(made)
            if len(base.spares) < self._settings.warm:
                self.short.set()

    async def _check(self) -> None:
        now = time.monotonic()
        for base in list(self._bases.values()):
            if now - base.checked_s < CHECK_EVERY_S:
                continue
            base.checked_s = now
            for _ in range(len(base.spares)):
                if not base.spares:
                    break
                spare = base.spares.pop(0)
                if await self._answers(spare):
                    if self._bases.get(base.spec.base or "") is base:
                        base.spares.append(spare)
                    else:
                        self._endings.destroy_later(spare)

    async def _answers(self, spare: Live) -> bool:
        """Whether it is alive; otherwise it is on its way out."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                result = await spare.sandbox.exec(":", ANSWER_TIMEOUT_S)
            alive = result.exit_code == 0 and not result.timed_out
        except (EnvironmentFailure, TimeoutError) as failure:
            _logger.info("spare %s is dead: %s", spare.sandbox.id, failure)
            alive = False
        except BaseException:
            self._endings.destroy_later(spare)
            raise
        if not alive:
            self._counters.add("warm_dead")
            self._endings.destroy_later(spare)
            self.short.set()
        return alive

    def _drop(self, base: _Base | None) -> None:
        for spare in base.spares if base is not None else ():
            self._endings.destroy_later(spare)
