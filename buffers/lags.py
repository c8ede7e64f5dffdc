"""Staleness of a rollout in policy versions, at three levels.

A lag is the version that would train on the rollout now, minus a recorded one. Its trajectory counts by its
first token, its tokens each by their own, its environment's state by whoever wrote what is there.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from midstream.buffers.rollout import PartialRollout
from midstream.envs.lineage import LineageError, chain, surviving_writes
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
    return 0 if rollout.dispatch_version is None else version - rollout.dispatch_version


def token_lags(rollout: PartialRollout, version: int) -> Counter[int]:
    """How many model tokens of the rollout are how many versions older than ``version``."""
    lags: Counter[int] = Counter()
    for span in rollout.spans:
        lags[version - span.version] += span.end - span.start
    return lags


def state_lag(snapshots: Mapping[str, Snapshot], last: str | None, version: int) -> int:
    """Age of the oldest write that survives in ``last``, a key of ``snapshots``, the records of one rollout.

    What is as at the task's start is nobody's write. Where the records do not lead back to that start, all
    of the recorded versions count.
    """
    writers = [] if last is None else [v for v in _writers(snapshots, last) if v is not None]
    return version - min(writers) if writers else 0


def _writers(snapshots: Mapping[str, Snapshot], last: str) -> list[int | None]:
    try:
        states = chain(snapshots, last)
    except LineageError:
        states = []
    if states and states[0].turn is None:
        return [write.version for write in surviving_writes(states)]
    return [snapshot.version for snapshot in snapshots.values()]
