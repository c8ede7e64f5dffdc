"""From the events of a run to the numbers that stand for it: the `runs` entries of `compare.json`.

Pure functions. A run may be unfinished and a number may be missing: what cannot be known is None.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from midstream.local.events import Event, RunEvents

Interval = tuple[float, float]


def summarise(events: RunEvents) -> dict[str, Any]:
    """One entry of `runs` in `compare.json`.

    - strategy, status: status is `ok`, `interrupted`, `failed`, or `unfinished` where the run recorded no end
    - steps: finished training steps
    - wall_s: the run's wall-clock, from its `end` event or, without one, until the last thing recorded; of a run
      that was resumed the sum of its parts
    - trained_rollouts: rollouts that reached the loss
    - generated_tokens: model tokens that the engine made
    - wasted_tokens: generated tokens that never reached a loss in this run: dropped, restarted, or still
      buffered at the end; wasted_fraction is their share of generated_tokens
    - reprefilled_tokens: tokens that the engine had and had to read again, because rollouts went on or began anew;
      they are no generated tokens, and no part of wasted_tokens
    - buffered_tokens: the part of wasted_tokens still buffered at the end, which might yet be trained on
    - lost_tokens: what the engine made in steps that were recorded and then lost, since the run was resumed from an
      earlier checkpoint; no other count here has them
    - trainer_wait_fraction: see `trainer_wait_fraction`
    - reward_first, reward_last: means of the steps' mean rewards over the first and the last fifth of the
      steps (at least one step)
    - reward_held_out: mean reward of the policy that was scored last, on tasks that it was not trained on, None where
      not measured; reward_held_out_sources: the same for each source of those tasks by its name
    - resumes, restores_checked, restores_bad: counts over the run
    - failed_rollouts: rollouts that no loss saw because their environment failed too often
    - max_logprob_gap_fresh: largest |trainer − engine| log-probability difference on tokens that the current
      policy made, None where none was measured
    - mean_response_tokens: model tokens per trained rollout
    - lag_trajectory_mean, lag_token_mean, lag_environment_mean, and …_max: see `lag_figures`
    """
    steps = events.steps
    generated_tokens = total(steps, "generated_tokens")
    buffered_tokens = int(number(steps[-1].get("buffered_tokens")) or 0) if steps else 0
    wasted_tokens = total(steps, "wasted_tokens") + buffered_tokens
    rewards = [number(step.get("reward_mean")) for step in steps]
    fifth = max(1, len(steps) // 5)
    gaps = finite(step.get("logprob_gap_fresh") for step in steps)
    scored = events.evaluation or {}
    return {
        "strategy": events.strategy,
        "status": events.status,
        "steps": len(steps),
        "wall_s": wall_s(events),
        "trained_rollouts": total(steps, "trained_rollouts"),
        "generated_tokens": generated_tokens,
        "wasted_tokens": wasted_tokens,
        "wasted_fraction": wasted_tokens / generated_tokens if generated_tokens else None,
        "reprefilled_tokens": total(steps, "reprefilled_tokens"),
        "buffered_tokens": buffered_tokens,
        "lost_tokens": total(events.lost, "generated_tokens"),
        "trainer_wait_fraction": trainer_wait_fraction(events),
        "reward_first": mean(rewards[:fifth]),
        "reward_last": mean(rewards[-fifth:]),
        "reward_held_out": number(scored.get("reward_mean")),
        "reward_held_out_sources": {
            str(name): number(score.get("reward_mean"))
            for name, score in (scored.get("sources") or {}).items()
        },
        "resumes": total(steps, "resumes"),
        "restores_checked": total(steps, "restores_checked"),
        "restores_bad": total(steps, "restores_bad"),
        "failed_rollouts": total(steps, "failed_rollouts"),
        "max_logprob_gap_fresh": max(gaps) if gaps else None,
        "mean_response_tokens": mean(response_tokens(events)),
        **lag_figures(steps),
    }


def lag_figures(steps: Sequence[Event]) -> dict[str, float | None]:
    """Mean and maximum lags of what was trained on, in policy versions, at the three levels.

    By trajectory and environment over rollouts, by token over tokens; None where nothing was trained on.
    """
    tokens: Counter[float] = Counter()
    for step in steps:
        tokens.update({float(lag): int(count) for lag, count in (step.get("lag_token") or {}).items()})
    levels = {
        "trajectory": Counter(finite(lag for step in steps for lag in step.get("lag_trajectory") or ())),
        "token": tokens,
        "environment": Counter(finite(lag for step in steps for lag in step.get("lag_environment") or ())),
    }
    means = {f"lag_{level}_mean": mean(lags.elements()) for level, lags in levels.items()}
    return means | {f"lag_{level}_max": max(lags, default=None) for level, lags in levels.items()}


def wall_s(events: RunEvents) -> float:
    """Seconds from the run's start to its end, or to the last time that its events mention."""
    recorded = number(events.end.get("wall_s")) if events.end else None
    if recorded is not None:
        return recorded
    steps = [*events.steps, *events.lost]
    times = [step.get(name) for step in steps for name in ("rollout_end", "train_end", "push_end")]
    times += [alarm.get("t") for alarm in events.alarms] + [part.get("elapsed_s") for part in events.parts]
    return max(finite(times), default=0.0)


def trainer_wait_fraction(events: RunEvents) -> float | None:
    """Share of the run's wall-clock in which the trainer waited for rollouts.

    The trainer waits where a rollout step is under way and no training and no push of weights is.
    """
    duration_s = wall_s(events)
    if not events.steps or duration_s <= 0:
        return None
    steps = [*events.steps, *events.lost]
    rollouts = intervals(steps, "rollout_start", "rollout_end")
    busy = intervals(steps, "train_start", "push_end")
    return (covered_s(rollouts + busy) - covered_s(busy)) / duration_s


def response_tokens(events: RunEvents) -> list[float]:
    """Model tokens of every trained rollout of the run."""
    return finite(tokens for step in events.steps for tokens in step.get("response_tokens") or ())


def intervals(steps: Iterable[Event], start: str, end: str) -> list[Interval]:
    """(start, end) in seconds of every step that has both and is not reversed."""
    pairs = ((number(step.get(start)), number(step.get(end))) for step in steps)
    return [(a, b) for a, b in pairs if a is not None and b is not None and b >= a]


def covered_s(spans: Iterable[Interval]) -> float:
    """Seconds covered by at least one of the intervals."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > until:
            covered += end - max(start, until)
            until = end
    return covered


def number(value: Any) -> float | None:
    """`value` as a finite float, None for whatever is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def finite(values: Iterable[Any]) -> list[float]:
    return [known for known in map(number, values) if known is not None]


def mean(values: Iterable[Any]) -> float | None:
    known = finite(values)
    return math.fsum(known) / len(known) if known else None


def total(steps: Sequence[Event], name: str) -> int:
    return int(sum(finite(step.get(name) for step in steps)))
