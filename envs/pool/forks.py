"""Many sandboxes from one snapshot: by one call of the backend, and one by one for what fails in that."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from midstream.envs.errors import SandboxFailure
from midstream.envs.pool.creation import Creations
from midstream.envs.pool.ending import Endings, Live
from midstream.envs.pool.limits import Limits, Relieve, Slot
from midstream.envs.pool.metrics import PoolCounters
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import Backend, Sandbox, SandboxSpec

# How long a fork that has some slots waits for more, where another process may do the same.
PATIENCE_S = 60.0


class Forks:
    """Forks of one pool's backend."""

    def __init__(
        self,
        backend: Backend,
        creations: Creations,
        endings: Endings,
        limits: Limits,
        counters: PoolCounters,
        relieve: Relieve,
    ) -> None:
        self._backend = backend
        self._creations = creations
        self._endings = endings
        self._limits = limits
        self._counters = counters
        self._relieve = relieve
        self._turn = asyncio.Lock()

    async def fork(self, spec: SandboxSpec, snapshot: Snapshot, count: int) -> list[Live | SandboxFailure]:
        """So many sandboxes, or why not, each on its own.

        Raises what concerns all of them, a missing snapshot say, or a cancellation, and then leaves none.
        """
        deadline = self._creations.deadline()
        slots, short = await self._slots(count, deadline)
        most = self._backend.capabilities.max_forks or count
        tasks = [
            asyncio.create_task(self._batch(spec, snapshot, slots[start : start + most], deadline))
            for start in range(0, len(slots), most)
        ]
        try:
            made = await asyncio.gather(*tasks)
        except BaseException:
            await asyncio.shield(self._endings.background(self._undo(tasks)))
            raise
        return [each for batch in made for each in batch] + short

    async def _slots(self, count: int, deadline: float) -> tuple[list[Slot], list[SandboxFailure]]:
        """As many slots as can be had, and a failure for each of the others.

        One fork at a time: two that each hold a part of what they need would wait for each other. Where other
        processes hold slots, too, whoever has some waits no longer than PATIENCE_S for the rest.
        """
        slots: list[Slot] = []
        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._turn:
                while len(slots) < min(count, self._limits.maximum):
                    left_s = max(0.0, deadline - time.monotonic())
                    patience_s = PATIENCE_S if slots and self._limits.is_shared else left_s
                    slots.append(await self._limits.take(min(left_s, patience_s), self._relieve))
        except (SandboxFailure, TimeoutError) as failure:
            why = str(failure) or "other forks were waiting for sandboxes all the time"
        except BaseException:
            for slot in slots:
                slot.release()
            raise
        else:
            why = f"a fork of {count} was asked for, and there are at most {self._limits.maximum} sandboxes"
        short = [SandboxFailure(why, "quota") for _ in range(count - len(slots))]
        self._counters.add("failures_quota", len(short))
        return slots, short

    async def _batch(
        self, spec: SandboxSpec, snapshot: Snapshot, slots: Sequence[Slot], deadline: float
    ) -> list[Live | SandboxFailure]:
        """One call, then for each that failed for a passing reason the attempts that any creation has."""

        async def make(count: int) -> Sequence[Sandbox | SandboxFailure]:
            return await self._backend.fork(spec, snapshot, count)

        filled = await self._creations.fill_all(slots, make, deadline)
        again: dict[int, asyncio.Task[list[Live | SandboxFailure]]] = {}
        for index, (each, slot) in enumerate(zip(filled, slots, strict=True)):
            if isinstance(each, SandboxFailure):
                if each.kind == "permanent":
                    slot.release()
                else:
                    again[index] = asyncio.create_task(self._retried(spec, snapshot, slot, deadline))
        try:
            retried = await asyncio.gather(*again.values())
        except BaseException:
            for each in filled:
                if isinstance(each, Live):
                    self._endings.destroy_later(each)
            await asyncio.shield(self._endings.background(self._undo(again.values())))
            raise
        for index, [each] in zip(again, retried, strict=True):
            filled[index] = each
        return filled

    async def _retried(
        self, spec: SandboxSpec, snapshot: Snapshot, slot: Slot, deadline: float
    ) -> list[Live | SandboxFailure]:
        async def make() -> Sandbox:
            [made] = await self._backend.fork(spec, snapshot, 1)
            if isinstance(made, SandboxFailure):
                raise made
            return made

        try:
            return [await self._creations.fill(slot, make, deadline, self._relieve)]
        except SandboxFailure as failure:
            return [failure]

    async def _undo(self, tasks: Iterable["asyncio.Task[list[Live | SandboxFailure]]"]) -> None:
        """Ends what is being made, and destroys what was."""
        tasks = list(tasks)
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            for each in made if isinstance(made, list) else ():
                if isinstance(each, Live):
                    self._endings.destroy_later(each)
