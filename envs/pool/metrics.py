"""What a pool counts. Every name is there from the start, with zeros, so that a chart of it has no holes."""

import math
from collections import Counter, deque
from typing import get_args

from midstream.envs.errors import FailureKind

# Start-up times that the percentiles are of: the latest ones.
TIMES_KEPT = 1024

COUNTED = (
    "starts",
    "resumes",
    "forks",
    *(f"failures_{kind}" for kind in get_args(FailureKind)),
    "failures_snapshot",
    "failures_destroy",
    "spilled",
    "reaped",
    "expired",
    "hot_hits",
    "hot_misses",
    "warm_hits",
    "warm_dead",
    "breaker_opened",
)
"""starts: sandboxes that came up, spares too. failures_<kind>: failed attempts by SandboxFailure.kind.
failures_snapshot: a snapshot that was missing, damaged or restored to another state. spilled: hot sandboxes
destroyed for want of budget or slots. reaped: what was left by killed processes or held beyond its lease,
of which expired are the leases. hot_misses: resumes that found no sandbox parked, or one that had changed."""


class PoolCounters:
    """Counts, and the seconds from asking for a sandbox to having it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._start_seconds = 0.0
        self._latest: deque[float] = deque(maxlen=TIMES_KEPT)

    def add(self, name: str, count: int = 1) -> None:
        if name not in COUNTED:
            raise KeyError(f"{name!r} is none of the counted: {', '.join(COUNTED)}")
        self._counts[name] += count

    def acquired(self, seconds: float) -> None:
        """One acquisition by a rollout: from asking to having, spares and hot ones included."""
        self._start_seconds += seconds
        self._latest.append(seconds)

    def as_dict(self) -> dict[str, float]:
        times = sorted(self._latest)
        return {
            **{name: float(self._counts[name]) for name in COUNTED},
            "start_seconds_sum": self._start_seconds,
            "start_seconds_p50": percentile(times, 0.50),
            "start_seconds_p99": percentile(times, 0.99),
        }


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that is not below this share of the values; 0 where there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
