"""Tells an outage from single failures, and keeps everybody from asking until it is over.

    closed      creations go on; their results are counted over a window
    open        the share of failures in the window is an outage's: nobody creates until a while has passed
    half open   then one creation, the probe, may try; its result closes the breaker or opens it for longer

An answer that refuses (throttled, quota, permanent) is not an outage: whoever refuses is there. A result of
a creation that began before the breaker last changed says nothing about now, and does not count.

A pure state machine: the time, in seconds of any steady clock, is passed in.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from midstream.envs.pool.settings import PoolSettings

BreakerState = Literal["closed", "open", "half_open"]


@dataclass(frozen=True)
class Admission:
    """The right to create once. Its result goes to `record`, or to `abandon` where there is none."""

    generation: int
    is_probe: bool


class Breaker:
    """Thresholds are the `breaker_*` settings."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._results: deque[tuple[float, bool]] = deque()
        self._generation = 0
        self._opened_at: float | None = None
        self._open_s = settings.breaker_open_s
        self._probing = False

    def state(self, now: float) -> BreakerState:
        if self._opened_at is None:
            return "closed"
        return "open" if now < self._opened_at + self._open_s else "half_open"

    def admit(self, now: float) -> Admission | None:
        """The right to create now; None while the breaker is open or its probe is on the way."""
        state = self.state(now)
        if state == "open" or (state == "half_open" and self._probing):
            return None
        self._probing = state == "half_open"
        return Admission(self._generation, self._probing)

    def wait_s(self, now: float) -> float:
        """How long until a probe is due; 0 where one is due or on its way, or the breaker is closed."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self._open_s - now)

    def record(self, admission: Admission, failed: bool, now: float) -> None:
        """The result of an admitted creation: whether it failed as in an outage."""
        if admission.generation != self._generation:
            return
        if admission.is_probe:
            self._conclude_probe(failed, now)
            return
        self._results.append((now, failed))
        if failed and self._is_outage(now):
            self._open(now)

    def abandon(self, admission: Admission) -> None:
        """The admitted creation ended without a result: a probe is free again for the next one."""
        if admission.is_probe and admission.generation == self._generation:
            self._probing = False

    def _is_outage(self, now: float) -> bool:
        while self._results and self._results[0][0] < now - self._settings.breaker_window_s:
            self._results.popleft()
        failures = sum(failed for _, failed in self._results)
        enough = len(self._results) >= self._settings.breaker_results
        return enough and failures >= self._settings.breaker_failed_share * len(self._results)

    def _conclude_probe(self, failed: bool, now: float) -> None:
        if failed:
            self._open_s = min(2 * self._open_s, self._settings.breaker_longest_s)
            self._open(now)
            return
        self._open_s = self._settings.breaker_open_s
        self._opened_at, self._probing = None, False
        self._generation += 1

    def _open(self, now: float) -> None:
        self._opened_at, self._probing = now, False
        self._generation += 1
        self._results.clear()
