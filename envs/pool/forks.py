"""Many sandboxes from one snapshot: by one call where slots are free, and one by one for what that leaves."""

import asyncio
from collections.abc import Iterable, Sequence

from midstream.envs.errors import SandboxFailure
from midstream.envs.pool.creation import Creations
from midstream.envs.pool.ending import Endings, Live
from midstream.envs.pool.limits import Limits, Relieve, Slot
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import Backend, Sandbox, SandboxSpec


class Forks:
    """Forks of one pool's backend."""

    def __init__(
        self, backend: Backend, creations: Creations, endings: Endings, limits: Limits, relieve: Relieve
    ) -> None:
        self._backend = backend
        self._creations = creations
        self._endings = endings
        self._limits = limits
        self._relieve = relieve

    async def fork(self, spec: SandboxSpec, snapshot: Snapshot, count: int) -> list[Live | SandboxFailure]:
        """So many sandboxes, or why not, each on its own.

        Raises what concerns all of them, a missing snapshot say, or a cancellation, and then leaves none.
        """
        deadline = self._creations.deadline()
        slots = await self._free_slots(count)
        batches = [
            self._batch(spec, snapshot, batch, deadline)
            for batch in _split(slots, self._backend.capabilities.max_forks or count)
        ]
        singles = [self._single(spec, snapshot, None, deadline) for _ in range(count - len(slots))]
        tasks = [asyncio.create_task(work) for work in (*batches, *singles)]
        try:
            made = await asyncio.gather(*tasks)
        except BaseException:
            await asyncio.shield(self._endings.background(self._undo(tasks)))
            raise
        return [each for batch in made for each in batch]

    async def _free_slots(self, count: int) -> list[Slot]:
        slots: list[Slot] = []
        try:
            while len(slots) < count and (slot := await self._limits.take_now()) is not None:
                slots.append(slot)
        except BaseException:
            for slot in slots:
                slot.release()
            raise
        return slots

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
                    again[index] = asyncio.create_task(self._single(spec, snapshot, slot, deadline))
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

    async def _single(
        self, spec: SandboxSpec, snapshot: Snapshot, slot: Slot | None, deadline: float
    ) -> list[Live | SandboxFailure]:
        async def make() -> Sandbox:
            [made] = await self._backend.fork(spec, snapshot, 1)
            if isinstance(made, SandboxFailure):
                raise made
            return made

        try:
            if slot is None:
                return [await self._creations.create(make, self._relieve)]
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


def _split(slots: Sequence[Slot], most: int) -> list[Sequence[Slot]]:
    return [slots[start : start + most] for start in range(0, len(slots), most)]
