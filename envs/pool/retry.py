"""Whether a failed creation is tried again, and when: one decision by kind of failure, one loop around it.

    throttled   after what the provider asks for, or growing waits; a little later than asked, each its own
    quota       when a sandbox is given back, looked for at growing intervals as well
    transient   after growing waits, each drawn anew, so that those who failed together come back apart
    permanent   never

Waits double from `retry_first_s` to `retry_longest_s`. A transient failure ends after `retry_attempts`; the
others pass by themselves, so that only the deadline ends them.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from midstream.envs.errors import SandboxFailure
from midstream.envs.pool.settings import PoolSettings

# How much later than asked a throttled caller comes back at most, as a share of the wait.
THROTTLE_JITTER = 0.1

P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Again:
    """Try again after so many seconds, or, with `on_release`, as soon as a sandbox is given back."""

    wait_s: float
    on_release: bool = False


@dataclass(frozen=True)
class GiveUp:
    reason: str


def decide(
    failure: SandboxFailure, attempt: int, left_s: float, settings: PoolSettings, draw: float
) -> Again | GiveUp:
    """What follows the `attempt`-th failure (from 1), `left_s` before the deadline; `draw` is from [0, 1)."""
    if failure.kind == "permanent":
        return GiveUp("asking again gives the same answer")
    if failure.kind == "transient" and attempt >= settings.retry_attempts:
        return GiveUp(f"attempt {attempt} of {settings.retry_attempts} failed")
    # The exponent is bounded only to keep the power finite.
    growing_s = min(settings.retry_first_s * 2.0 ** min(attempt - 1, 60), settings.retry_longest_s)
    if failure.kind == "transient":
        again = Again(growing_s * (0.5 + 0.5 * draw))
    elif failure.retry_after_s is not None:
        again = Again(failure.retry_after_s * (1 + THROTTLE_JITTER * draw), failure.kind == "quota")
    else:
        again = Again(growing_s * (1 + THROTTLE_JITTER * draw), failure.kind == "quota")
    if again.wait_s > left_s and not (again.on_release and left_s > 0):
        return GiveUp(f"the next attempt would be in {again.wait_s:.1f} s, the deadline is in {left_s:.1f} s")
    return Again(min(again.wait_s, left_s), again.on_release)


async def retrying(
    ready: Callable[[], Awaitable[P]],
    attempt: Callable[[P], Awaitable[T]],
    settings: PoolSettings,
    *,
    deadline: float,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
    until_release: Callable[[float], Awaitable[None]],
    draw: Callable[[], float],
) -> T:
    """Calls `attempt` until it succeeds or `decide` gives up, each time when `ready` lets it, with its result.

    `until_release(s)` waits for a sandbox to be given back, so many seconds at most. Raises
    SandboxFailure, of the last failure's kind, naming the number of attempts, and what else `ready` and
    `attempt` raise.
    """
    count = 0
    while True:
        count += 1
        leave = await ready()
        try:
            return await attempt(leave)
        except SandboxFailure as failure:
            decision = decide(failure, count, deadline - clock(), settings, draw())
            if isinstance(decision, GiveUp):
                if count == 1 and failure.kind == "permanent":
                    raise
                message = f"{failure} (given up after {count} attempt{'s' * (count > 1)}: {decision.reason})"
                raise SandboxFailure(message, failure.kind, failure.retry_after_s) from failure
        await (until_release if decision.on_release else sleep)(decision.wait_s)
