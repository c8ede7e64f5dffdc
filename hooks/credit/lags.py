"""Staleness of a rollout in policy versions."""

from collections import Counter

from midstream.buffers.rollout import PartialRollout


def trajectory_lag(rollout: PartialRollout, version: int) -> int:
    """Versions between the rollout's first token and ``version``, the policy that trains on it."""
    return 0 if rollout.dispatch_version is None else version - rollout.dispatch_version


def token_lags(rollout: PartialRollout, version: int) -> Counter[int]:
    """How many model tokens of the rollout are how many versions older than ``version``."""
    lags: Counter[int] = Counter()
    for span in rollout.spans:
        lags[version - span.version] += span.end - span.start
    return lags
