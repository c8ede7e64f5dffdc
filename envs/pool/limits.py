"""How many sandboxes may exist, and how many may begin per second, across processes and hosts.

With a shared path, all pools that name it are counted together, in one locked file. What is guaranteed:

- The number of slots that living processes hold never exceeds `max_sandboxes`. A killed process's slots are
  free again at the next acquisition on its host; those of a process that other hosts, PID namespaces or boots
  cannot see, when its heartbeat has not changed for SILENT_S by the clock of whoever looks. A process that was
  only stopped for that long takes its slots back when it goes on, so that the number can be exceeded until
  sandboxes are given back.
- Begun sandboxes are spread: the times given out lie at least 1/`creations_per_s` apart, in the order of
  asking, so that any T seconds hold at most `creations_per_s` × T + 1. A cancelled creation's time is lost.
  Hosts' clocks that differ move times by as much. A clock that is set back starts the spreading anew.

Whoever finds too long a queue waits no longer than its deadline and fails with a SandboxFailure that says what
to do: kind "quota" where no slot came free, "throttled" where the next time to begin lies behind the deadline
(at once, with nothing reserved). Without a shared path the same holds within this pool.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from midstream.envs.errors import SandboxFailure
from midstream.envs.ownership.owners import Owner, is_alive
from midstream.envs.pool.ledger import Ledger

# How often a process says that it lives, and after what silence others, who cannot see it, take its slots.
BEAT_S = 10.0
SILENT_S = 120.0
# How often whoever waits first looks whether another process has given a slot back.
SLOT_POLL_S = 0.1
# How often whoever waits first looks for an idle sandbox of this process that has become one meanwhile.
IDLE_POLL_S = 0.5
# By how much a clock may be off before the spreading takes it for one that was set back.
CLOCK_TOLERANCE_S = 5.0

T = TypeVar("T")
Relieve = Callable[[], Awaitable[bool]]


def reserve(next_s: float, now_s: float, rate: float, longest_wait_s: float) -> tuple[float, float]:
    """When to begin, and the `next_s` of whoever asks after; a leaky bucket that holds one.

    Where beginning would be later than `longest_wait_s` from now, `next_s` comes back as it was.
    """
    begin_s = max(next_s, now_s)
    return begin_s, next_s if begin_s - now_s > longest_wait_s else begin_s + 1 / rate


@dataclass
class SharedCounts:
    """The slots and the spreading in the file; methods block, and belong to one thread."""

    directory: Path
    owner: Owner
    maximum: int
    waiting: int = 0
    """Coroutines of this process that wait for a slot; others then spill what lies idle with them."""
    _own: int = 0
    _beats: int = 0
    # By pool: the last heartbeat seen, and when, by our own steady clock.
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.directory / "sandboxes.ledger")
        # A process may have several pools.
        self._key = f"{self.owner.label}+{secrets.token_hex(4)}"

    def take(self) -> bool:
        """Takes a slot if one is free."""
        with self._ledger.changing() as content:
            owners = self._living(content)
            others = sum(entry[0] for key, entry in owners.items() if key != self._key)
            taken = others + self._own < self.maximum
            owners[self._key] = [self._own + taken, self._beats, self.waiting]
        self._own += taken
        return taken

    def give_back(self) -> None:
        self._own -= 1
        self.beat()

    def beat(self) -> int:
        """Says that this process lives and what it holds. Returns how many wait in the others."""
        self._beats += 1
        with self._ledger.changing() as content:
            owners = self._living(content)
            owners[self._key] = [self._own, self._beats, self.waiting]
            return sum(entry[2] for key, entry in owners.items() if key != self._key)

    def leave(self) -> None:
        self._own = 0
        with self._ledger.changing() as content:
            content.get("owners", {}).pop(self._key, None)

    def reserve(self, rate: float, longest_wait_s: float) -> float:
        """Seconds until the reserved time; where they exceed `longest_wait_s`, nothing was reserved."""
        with self._ledger.changing() as content:
            now_s = time.time()
            next_s, reach_s = content.get("next_s", 0.0), content.get("reach_s", 0.0)
            if next_s > now_s + reach_s + CLOCK_TOLERANCE_S:
                # Nobody reserves that far ahead: the clock was set back.
                next_s = now_s
            begin_s, content["next_s"] = reserve(next_s, now_s, rate, longest_wait_s)
            content["reach_s"] = max(reach_s, longest_wait_s + 1 / rate)
        return begin_s - now_s

    def _living(self, content: dict[str, Any]) -> dict[str, list[int]]:
        """The entries, without those of processes that are gone."""
        owners: dict[str, list[int]] = content.setdefault("owners", {})
        for key in list(owners):
            if key != self._key and self._is_gone(key, owners[key][1]):
                del owners[key]
                self._seen.pop(key, None)
        return owners

    def _is_gone(self, key: str, beat: int) -> bool:
        owner = Owner.parse(key.rpartition("+")[0])
        alive = is_alive(owner) if owner is not None else None
        if alive is not None:
            return not alive
        now = time.monotonic()
        last_beat, since = self._seen.get(key, (None, now))
        if last_beat != beat:
            self._seen[key] = (beat, now)
            return False
        return now - since > SILENT_S


class Slot:
    """The right to one live sandbox; given back once, however often that is said."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Limits:
    """Slots and spreading for the coroutines of one event loop. Give back with `Slot.release`, then `close`."""

    def __init__(self, maximum: int, rate: float | None, shared_path: Path | None, owner: Owner) -> None:
        """Raises EnvironmentFailure where the shared path cannot be used."""
        self.maximum = maximum
        self.rate = rate
        self.held = 0
        self._next_s = 0.0
        self._turn = asyncio.Lock()
        self._release: asyncio.Future[None] | None = None
        self._closed = False
        self._waiting = 0
        self._work: set[asyncio.Future[Any]] = set()
        self._shared = None if shared_path is None else SharedCounts(shared_path, owner, maximum)
        self._thread = ThreadPoolExecutor(1, "midstream-slots") if self._shared is not None else None

    async def take(self, timeout_s: float, relieve: Relieve | None = None) -> Slot:
        """A slot, after those who asked before. `relieve` is asked to free one, and says whether it did.

        Raises SandboxFailure (quota) after the timeout.
        """
        self._wait(1)
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while True:
                    release = self._next_release()
                    slot = await self.take_now()
                    if slot is not None:
                        return slot
                    if relieve is None or not await relieve():
                        await asyncio.wait([release], timeout=SLOT_POLL_S if self._shared else IDLE_POLL_S)
        except TimeoutError:
            where = "" if self._shared is None else f" in all processes that share {self._shared.directory}"
            raise SandboxFailure(
                f"all {self.maximum} sandboxes{where} were in use for {timeout_s:.1f} s ({self.held} by this "
                "process): raise max_sandboxes or acquire_timeout_s, or run fewer rollouts at once",
                "quota",
            ) from None
        finally:
            self._wait(-1)

    @property
    def is_shared(self) -> bool:
        """Whether other processes take of the same slots."""
        return self._shared is not None

    @property
    def waiting(self) -> int:
        """Coroutines of this process that want a slot and have none."""
        return self._waiting

    async def take_now(self) -> Slot | None:
        """A slot if one is free at this moment."""
        if self._shared is None:
            if self.held >= self.maximum:
                return None
        else:
            taking = self._in_thread(self._shared.take)
            try:
                if not await asyncio.shield(taking):
                    return None
            except asyncio.CancelledError:
                taking.add_done_callback(self._return_unwanted)
                raise
        self.held += 1
        return Slot(self._give_back)

    async def until_release(self, timeout_s: float) -> None:
        """Until a slot of this process is given back, or the time is over."""
        await asyncio.wait([self._next_release()], timeout=timeout_s)

    async def pace(self, timeout_s: float) -> None:
        """Waits for this creation's time to begin. Raises SandboxFailure (throttled) at once if that is too late."""
        if self.rate is None:
            return
        if self._shared is not None:
            wait_s = await self._in_thread(partial(self._shared.reserve, self.rate, timeout_s))
        else:
            now_s = time.monotonic()
            begin_s, self._next_s = reserve(self._next_s, now_s, self.rate, timeout_s)
            wait_s = begin_s - now_s
        if wait_s > timeout_s:
            raise SandboxFailure(
                f"creations are {wait_s:.1f} s behind at {self.rate:g} per second, this one may wait "
                f"{max(timeout_s, 0):.1f} s: raise creations_per_s or acquire_timeout_s, or run fewer rollouts at once",
                "throttled",
                wait_s,
            )
        await asyncio.sleep(wait_s)

    async def beat(self) -> int:
        """Says to the other processes that this one lives; call it every BEAT_S. Returns how many wait there."""
        return 0 if self._shared is None else await self._in_thread(self._shared.beat)

    async def close(self) -> None:
        """Takes this process out of the count. Slots that are still held count no more."""
        self._closed = True
        if self._shared is not None and self._thread is not None:
            while self._work:
                await asyncio.wait(self._work)
            await self._in_thread(self._shared.leave)
            self._thread.shutdown()

    def _wait(self, change: int) -> None:
        self._waiting += change
        if self._shared is not None:
            self._shared.waiting = self._waiting

    def _next_release(self) -> "asyncio.Future[None]":
        if self._release is None:
            self._release = asyncio.get_running_loop().create_future()
        return self._release

    def _give_back(self) -> None:
        self.held -= 1
        if self._shared is not None and not self._closed:
            self._in_thread(self._shared.give_back)
        release, self._release = self._release, None
        if release is not None:
            release.set_result(None)

    def _return_unwanted(self, taking: "asyncio.Future[bool]") -> None:
        if not taking.cancelled() and taking.exception() is None and taking.result():
            assert self._shared is not None
            self._in_thread(self._shared.give_back)

    def _in_thread(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._work.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: "asyncio.Future[Any]") -> None:
        self._work.discard(future)
        if not future.cancelled():
            # A count that could not be written is written with the next one.
            future.exception()
