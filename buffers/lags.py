"""Staleness of a rollout in policy versions, at three levels.

A lag is the version that would train on the rollout now, minus a recorded one, and never negative: what is newer,
as after a host has gone back to an earlier checkpoint, counts as fresh. Its trajectory counts by its
first token, its tokens each by their own, its environment's state by whoever wrote what is there.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from midstream.buffers.rollout import PartialRollout
from midstream.envs.lineage import LineageError, chain, shares, surviving_writes
from midstream.envs.protocol import Snapshot


@dataclass(frozen=True)
class Lags:
    """The largest lag of a rollout at each level; 0 where nothing is there."""

    trajectory: int
    token: int
    environment: int


def lags(rollout: PartialRollout, version: int) -> Lags:
    """The largest lags of ``rollout`` where the policy is at ``version``.

    The environment's is that of the state in which a resume would go on.
    """
    return Lags(
        trajectory_lag(rollout, version),
        max(token_lags(rollout, version), default=0),
        state_lag(rollout.snapshots, rollout.newest_snapshot, version),
    )


def trajectory_lag(rollout: PartialRollout, version: int) -> int:
    """Versions between the rollout's first token and ``version``, the policy that trains on it."""
    return 0 if rollout.dispatch_version is None else max(0, version - rollout.dispatch_version)


def token_lags(rollout: PartialRollout, version: int) -> Counter[int]:
    """How many model tokens of the rollout are how many versions older than ``version``."""
    lags: Counter[int] = Counter()
    for span in rollout.spans:
        lags[max(0, version - span.version)] += span.end - span.start
    return lags


def state_lag(snapshots: Mapping[str, Snapshot], last: str | None, version: int) -> int:
    """Age of the oldest write that survives in ``last``, a key of ``snapshots``, the records of one rollout.

    What is as at the task's start is nobody's write. Where the records do not lead back to that start, all
    of the recorded versions count.
    """
    return max(state_lags(snapshots, last, version), default=0)


def state_lags(snapshots: Mapping[str, Snapshot], last: str | None, version: int) -> dict[int, float]:
    """Which share of what differs from the task's start was written how many versions before ``version``, by bytes.

    The shares sum to 1; none where nothing differs. ``snapshots`` and ``last`` as in ``state_lag``.
    """
    known = {} if last is None else _written(snapshots, last)
    weights: defaultdict[int, float] = defaultdict(float)
    for writer, weight in known.items():
        if writer is not None:
            weights[max(0, version - writer)] += weight
    total = sum(weights.values())
    return {lag: weight / total for lag, weight in weights.items()}


def _written(snapshots: Mapping[str, Snapshot], last: str) -> Mapping[int | None, float]:
    """How much each version wrote."""
    try:
        states = chain(snapshots, last)
    except LineageError:
        states = []
    if states and states[0].turn is None:
        return shares(surviving_writes(states))
    return Counter(snapshot.version for snapshot in snapshots.values())
