"""Staleness of a batch at three levels, in policy versions, for the host's log."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from midstream.buffers.lags import state_lags, token_lags, trajectory_lag
from midstream.buffers.rollout import PartialRollout


def staleness_metrics(
    rollouts: Sequence[PartialRollout], version: int, bound: int | None
) -> dict[str, float]:
    """Lags under the policy `version` that trains, zeros included.

    - `trajectory_*`: over rollouts, of their first token
    - `token_*`: over model tokens
    - `env_mean`: over rollouts, the mean lag of what differs from the task's start in their last known state,
      weighted by bytes; `env_max`: the lag of the oldest such write; `env_share_beyond`: the share of it that is
      older than `bound`, 0 without one
    - `from_the_future`: rollouts with tokens of a version after `version`, as when a host goes on from an earlier
      checkpoint than its buffer; these count as fresh, here and for estimators
    """
    trajectory = [trajectory_lag(rollout, version) for rollout in rollouts]
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        tokens += token_lags(rollout, version)
    future = sum(any(span.version > version for span in rollout.spans) for rollout in rollouts)
    states = [state_lags(rollout.snapshots, rollout.newest_snapshot, version) for rollout in rollouts]
    means = [sum(lag * share for lag, share in lags.items()) for lags in states]
    beyond = [
        sum(share for lag, share in lags.items() if bound is not None and lag > bound) for lags in states
    ]
    count = tokens.total()
    return {
        "staleness/trajectory_mean": _mean(trajectory),
        "staleness/trajectory_max": float(max(trajectory, default=0)),
        "staleness/token_mean": sum(lag * n for lag, n in tokens.items()) / count if count else 0.0,
        "staleness/token_max": float(max(tokens, default=0)),
        "staleness/env_mean": _mean(means),
        "staleness/env_max": float(max((lag for lags in states for lag in lags), default=0)),
        "staleness/env_share_beyond": _mean(beyond),
        "staleness/from_the_future": float(future),
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
