"""The bounds on lag that hold under every policy."""

import copy

from midstream.buffers.lags import Lags, lags
from midstream.buffers.policies.base import Action, Choice
from midstream.buffers.rollout import PartialRollout, Status
from midstream.conf.schema import BoundsConfig

REASONS = {
    "trajectory": "trajectory_lag",
    "token": "token_lag",
    "environment": "environment_lag",
}
"""The levels of lag, fields of `Lags` and of the bounds, and the names under which they are counted."""


def bounded(
    choice: Choice,
    rollout: PartialRollout,
    version: int,
    bounds: BoundsConfig,
    source: PartialRollout | None = None,
) -> Choice:
    """The choice, or ``bounds.beyond`` where what it leaves of ``rollout`` is too old at some level.

    ``source`` is the sibling that it becomes a fork of, if that is the choice. A rollout that has ended is
    judged too, since it would be trained on; one that failed would not.
    """
    if choice.action in (Action.RESTART, Action.DROP) or rollout.status is Status.FAILED:
        return choice
    left = copy.copy(rollout)
    choice.apply(left, source)
    level = exceeded(lags(left, version), bounds)
    return choice if level is None else Choice(Action(bounds.beyond), reason=REASONS[level])


def exceeded(found: Lags, bounds: BoundsConfig) -> str | None:
    """The first level whose bound is exceeded."""
    for level in REASONS:
        bound = getattr(bounds, level)
        if bound is not None and getattr(found, level) > bound:
            return level
    return None
