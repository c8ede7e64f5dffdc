"""Running totals of what a step uses: its own figures are their differences."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstream.buffers.rollout import PartialRollout
from midstream.hooks.slime.settings import engine_of, environments_of, tally_of


@dataclass(frozen=True)
class Totals:
    """Of the engine's client, the environments and the buffer; what is buffered is what waits now."""

    generated_tokens: int
    reprefilled_tokens: int
    buffered_rollouts: int
    buffered_tokens: int
    buffered_resumes: int
    dropped_resumes: int
    restores_checked: int
    restores_bad: int


def totals_of(args: Namespace, data_source: Any) -> Totals:
    """What has been counted up to now; a data source or environments that count nothing have zeros."""
    waiting = data_source.waiting() if hasattr(data_source, "waiting") else []
    metrics: dict[str, float] = getattr(environments_of(args), "metrics", dict)()
    counters = engine_of(args).counters
    return Totals(
        generated_tokens=counters.generated_tokens,
        reprefilled_tokens=counters.reprefilled_tokens,
        buffered_rollouts=len(waiting),
        buffered_tokens=sum(rollout.own_tokens for rollout in waiting),
        buffered_resumes=resumes_of(waiting),
        dropped_resumes=tally_of(args).dropped_resumes,
        restores_checked=int(metrics.get("env/restores_checked", 0)),
        restores_bad=int(metrics.get("env/restores_bad", 0)),
    )


def resumes_of(rollouts: Sequence[PartialRollout]) -> int:
    """How often these rollouts went on, all together."""
    return sum(rollout.resumes for rollout in rollouts)
