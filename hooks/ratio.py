"""How far the policy of the day is from the ones that made some tokens, measured by the engine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from midstream.buffers.rollout import PartialRollout
from midstream.hooks.engine import Engine


async def mean_squared_log_ratio(
    engine: Engine,
    rollouts: Sequence[PartialRollout],
    routing_keys: Sequence[str | None],
    aborted: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean over all trained tokens of ``rollouts`` of (log-prob under the engine's weights - recorded one)^2.

    In nats squared. The prefill that this costs is what a resume needs anyway, and the engine caches it.
    ``routing_keys`` has one entry per rollout, so that each is measured where it goes on. None where the host
    or somebody else aborted it, or where no token is trained.

    Raises:
        EngineUnavailable, EngineRejected: as ``Engine.log_probs`` does.
    """
    measured = await asyncio.gather(
        *(
            _squares(engine, rollout, routing_key, aborted)
            for rollout, routing_key in zip(rollouts, routing_keys, strict=True)
        ),
        return_exceptions=True,
    )
    squares: list[float] = []
    for one in measured:
        if isinstance(one, BaseException):
            raise one
        if one is None:
            return None
        squares += one
    return sum(squares) / len(squares) if squares else None


async def _squares(
    engine: Engine, rollout: PartialRollout, routing_key: str | None, aborted: Callable[[], bool]
) -> list[float] | None:
    trained = [position for position, mask in enumerate(rollout.loss_mask) if mask]
    if not trained:
        return []
    known = rollout.prompt_tokens + rollout.tokens[: trained[-1] + 1]
    now = await engine.log_probs(known, len(rollout.prompt_tokens), aborted=aborted, routing_key=routing_key)
    return None if now is None else [(now[at] - rollout.log_probs[at]) ** 2 for at in trained]


class Shared:
    """Work that several coroutines of one event loop wait for, of which the first to come has it started.

    It goes on while anybody waits for it: one that is cancelled leaves it to the others.
    """

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._task: asyncio.Future[None] | None = None
        self._waiters = 0

    async def done(self) -> None:
        """Return when the work is over; raises what it raised."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())
        task = self._task
        self._waiters += 1
        try:
            await asyncio.shield(task)
        finally:
            self._waiters -= 1
            if not self._waiters and not task.done():
                self._task = None
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
