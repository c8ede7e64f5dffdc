"""The pool: owns every sandbox of a process, from its creation to its end.

A rollout leases a sandbox and gives it back, or parks it under its last snapshot when it is cut off. Whatever
happens to the rollout, its sandbox is destroyed and its slot is free again: by release, by the lease's
deadline, by close, or after a kill by the next process's reaper.
"""

import asyncio
import logging
import math
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from midstream.envs.errors import EnvironmentFailure, SandboxFailure
from midstream.envs.ownership import claims
from midstream.envs.ownership.owners import this_process
from midstream.envs.pool.creation import Creations
from midstream.envs.pool.ending import Endings, Live
from midstream.envs.pool.forks import Forks
from midstream.envs.pool.leases import Lease, Leases
from midstream.envs.pool.limits import BEAT_S, Limits
from midstream.envs.pool.metrics import PoolCounters
from midstream.envs.pool.parking import Parking
from midstream.envs.pool.reaper import reap
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.pool.tending import Chore, Tending
from midstream.envs.pool.warm import Spares
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.protocol import Backend, SandboxSpec

# How often leases are looked through, and whether others want the slots of what lies idle here.
TEND_S = 1.0
# How often spares are made up for without being asked.
REFILL_S = 5.0
CLOSE_POLL_S = 0.001

_logger = logging.getLogger(__name__)


class Pool:
    """Sandboxes of one backend, for the coroutines of one event loop.

    It starts with the first acquisition, on the loop that runs then, and belongs to that loop until `close`.
    The backend is the caller's: it is closed after the pool.
    """

    def __init__(self, backend: Backend, settings: PoolSettings | None = None, *, job: str = "") -> None:
        """`job` goes into the owner's label. Raises EnvironmentFailure where `shared_path` cannot be used."""
        self.backend = backend
        self.settings = settings or PoolSettings()
        owner = this_process(job)
        self.owner = owner.label
        self._counters = PoolCounters()
        self._limits = Limits(
            self.settings.most_sandboxes(), self.settings.creations_per_s, self.settings.shared_path, owner
        )
        self._endings = Endings(self.settings, self._counters)
        self._creations = Creations(self._limits, self._endings, self.settings, self._counters)
        self._leases = Leases(self.settings.lease_s)
        self._parking = Parking(self._endings, self.settings, self._counters)
        self._spares = Spares(
            backend, self._creations, self._endings, self._limits, self.settings, self._counters
        )
        self._forks = Forks(
            backend, self._creations, self._endings, self._limits, self._counters, self._relieve
        )
        self._acquiring: set[asyncio.Timeout] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tending: Tending | None = None
        self._beat_s = -math.inf
        self._closing: asyncio.Task[None] | None = None
        self._closed = False

    async def lease(self, spec: SandboxSpec) -> Lease:
        """A sandbox as the spec says: a spare where there is one, else a new one.

        Raises SandboxFailure where none can be had in time; its kind says what would help.
        """
        spec = self._owned(spec)
        async with self._acquisition():
            live = await self._spares.take(spec)
            if live is None:
                live = await self._creations.create(partial(self.backend.create, spec), self._relieve)
            return self._opened(spec, live)

    async def resume(self, spec: SandboxSpec, snapshot: Snapshot) -> Lease:
        """A sandbox in the state of the snapshot: the one parked under it if that is still as it was, else a new one.

        Raises SandboxFailure as `lease` does, and SnapshotMissing, SnapshotDamaged or RestoreMismatch.
        """
        spec = self._owned(spec)
        async with self._acquisition():
            self._counters.add("resumes")
            live = await self._parking.take(snapshot)
            if live is None:
                live = await self._creations.create(
                    partial(self.backend.restore, spec, snapshot), self._relieve
                )
            return self._opened(spec, live)

    async def fork(self, spec: SandboxSpec, snapshot: Snapshot, count: int) -> list[Lease | SandboxFailure]:
        """So many sandboxes in the state of the snapshot, each of which fails on its own.

        Raises SnapshotMissing, SnapshotDamaged or RestoreMismatch, and then leaves none.
        """
        spec = self._owned(spec)
        async with self._acquisition():
            self._counters.add("forks", count)
            made = await self._forks.fork(spec, snapshot, count)
            return [self._opened(spec, each) if isinstance(each, Live) else each for each in made]

    async def park(self, lease: Lease, snapshot: Snapshot) -> bool:
        """Ends the lease of a rollout that is cut off; keeps its sandbox for `resume` if the budget allows.

        `snapshot` is the last one of this sandbox, and nothing was run in it since: the store has it, so that
        nothing is lost where the sandbox is not kept. Returns whether it is kept, for now.
        """
        if not self._leases.close(lease):
            return False
        if self._limits.waiting:
            # Somebody waits for a slot: this one would be the next to go.
            self._counters.add("spilled")
            await self._endings.destroy(lease.live)
            return False
        return await asyncio.shield(self._endings.background(self._park(lease, snapshot)))

    async def discard(self, snapshot: Snapshot) -> bool:
        """Ends a sandbox parked under the snapshot, whose rollout will not go on; False where there is none."""
        return await self._parking.discard(snapshot)

    async def release(self, lease: Lease) -> None:
        """Ends the lease and its sandbox; fine where it is over. A cancelled caller does not stop it."""
        if self._leases.close(lease):
            await self._endings.destroy(lease.live)
            self._spares.slot_came_free()

    def heartbeat(self, lease: Lease) -> bool:
        """Moves the lease's deadline to `lease_s` from now; False where it is over, and its sandbox gone."""
        return self._leases.extend(lease, time.monotonic())

    def prepare(self, spec: SandboxSpec) -> None:
        """Has spares made for a spec with a base before it is first asked for. Needs the running loop."""
        self._begin()
        self._spares.want(self._owned(spec))

    async def close(self) -> None:
        """Ends acquisitions, with EnvironmentFailure, and all sandboxes; returns when they are gone.

        Can be called twice. Raises nothing for what would not go: it is logged and counted.
        """
        if self._closing is None:
            if self._loop is not None:
                self._check_loop()
            self._closed = True
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and what there is now: `in_use`, `warm`, `hot`, `slots`, `waiting`."""
        return {
            **self._counters.as_dict(),
            "in_use": float(len(self._leases)),
            "warm": float(len(self._spares)),
            "hot": float(len(self._parking.hot)),
            "hot_bytes": float(self._parking.hot.bytes),
            "slots": float(self._limits.held),
            "waiting": float(len(self._acquiring)),
            "breaker_open": float(self._creations.breaker.state(time.monotonic()) != "closed"),
        }

    async def _park(self, lease: Lease, snapshot: Snapshot) -> bool:
        kept = await self._parking.park(lease.live, snapshot)
        if kept and self._limits.waiting:
            # Somebody began to wait while it was being stopped.
            await self._parking.spill_oldest()
        return kept

    async def _close(self) -> None:
        for acquisition in self._acquiring:
            acquisition.reschedule(asyncio.get_running_loop().time())
        while self._acquiring:  # noqa: ASYNC110 (each ends within a step or two)
            await asyncio.sleep(CLOSE_POLL_S)
        if self._tending is not None:
            await self._tending.stop()
        # What is being parked or made now has come to rest after this.
        await self._endings.close()
        leased = [lease.live for lease in self._leases.close_all()]
        for live in (*leased, *self._spares.close(), *self._parking.close()):
            self._endings.destroy_later(live)
        await self._endings.close()
        await self._limits.close()
        if self.settings.sandbox_root is not None:
            claims.end_beat(self.settings.sandbox_root, self.owner)

    def _begin(self) -> None:
        """Starts the pool on the running loop, or checks that it belongs to it."""
        if self._closed:
            raise EnvironmentFailure("the pool is closed: make a new one")
        if self._loop is not None:
            self._check_loop()
        else:
            self._loop = asyncio.get_running_loop()
            self._tending = Tending(
                Chore(self._tend, TEND_S),
                Chore(self._spares.refill, REFILL_S, self._spares.short),
                Chore(self._reap, self.settings.reap_interval_s),
            )

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            state = "is closed" if self._loop is None or self._loop.is_closed() else "is another one"
            raise RuntimeError(
                f"the event loop on which this pool began {state}: make one pool for each loop, and close it there"
            )

    @asynccontextmanager
    async def _acquisition(self) -> AsyncIterator[None]:
        """Counts and times an acquisition, and ends it where the pool is closed meanwhile."""
        self._begin()
        begun_s = time.monotonic()
        acquisition = asyncio.timeout(None)
        try:
            async with acquisition:
                self._acquiring.add(acquisition)
                try:
                    yield
                finally:
                    self._acquiring.discard(acquisition)
        except TimeoutError:
            if acquisition.expired():
                raise EnvironmentFailure("the pool was closed while a sandbox was waited for") from None
            raise
        self._counters.acquired(time.monotonic() - begun_s)

    def _owned(self, spec: SandboxSpec) -> SandboxSpec:
        return spec if spec.owner else replace(spec, owner=self.owner)

    def _opened(self, spec: SandboxSpec, live: Live) -> Lease:
        return self._leases.open(spec, live, time.monotonic())

    async def _relieve(self) -> bool:
        """Ends what lies idle longest, so that its slot is free: hot ones first, then spares."""
        if await self._parking.spill_oldest():
            return True
        spare = self._spares.least_wanted()
        if spare is None:
            return False
        await self._endings.destroy(spare)
        return True

    async def _tend(self) -> None:
        now = time.monotonic()
        for lease in self._leases.close_expired(now):
            self._counters.add("expired")
            self._counters.add("reaped")
            _logger.warning(
                "sandbox %s was held for %.0f s without a heartbeat: it is destroyed, its rollout is stuck",
                lease.live.sandbox.id,
                self.settings.lease_s,
            )
            self._endings.destroy_later(lease.live)
        idle = len(self._parking.hot) + len(self._spares)
        if idle or now >= self._beat_s + BEAT_S:
            self._beat_s = now
            for _ in range(min(idle, await self._limits.beat())):
                await self._relieve()

    async def _reap(self) -> None:
        """Removes what killed processes left, and asks once more what would not go."""
        root = self.settings.sandbox_root
        if root is not None and root.is_dir():
            await asyncio.to_thread(claims.beat, root, self.owner)
        roots = [] if root is None else [root]
        reaped = await asyncio.to_thread(reap, roots, Path(tempfile.gettempdir()))
        self._counters.add("reaped", reaped.count)
        for what in reaped.removed:
            _logger.info("removed what a killed process left: %s", what)
        for what in reaped.failed:
            _logger.warning("left by a killed process, and cannot be removed: %s", what)
        await self._endings.retry()
