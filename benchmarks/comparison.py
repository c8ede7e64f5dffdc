"""From the events of runs to what the comparison of strategies prints: pure functions."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from result import target

from midstream.envs.pool.metrics import percentile
from midstream.local.events import RunEvents
from midstream.local.summary import finite, mean, response_tokens, summarise, total

WAIT, NAIVE = "wait", "naive"
BEST_DISCARD, DISCARD_TWICE = "discard, best", "discard, 2x"
CANDIDATES = ("continue", "anchor")  # one of them has to reach the targets

TARGET_PACE, TARGET_WASTE, TARGET_LENGTH = 1.5, 0.10, 0.05

# What a row takes over from the run's summary as it is.
KEPT = (
    "status", "steps", "wall_s", "trained_rollouts", "generated_tokens", "wasted_fraction", "trainer_wait_fraction",
    "lag_trajectory_mean", "lag_trajectory_max", "lag_token_mean", "lag_token_max", "lag_environment_mean",
    "lag_environment_max", "mean_response_tokens", "reward_first", "reward_last", "reward_held_out", "resumes",
    "restores_checked", "restores_bad", "failed_rollouts",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A strategy with its over-sampling; several variants may share a strategy."""

    name: str
    strategy: str
    factor: float


def rollouts_per_hour(events: RunEvents) -> float:
    """Rollouts that reached a loss, per hour of the run."""
    run = summarise(events)
    return float(3600 * run["trained_rollouts"] / run["wall_s"]) if run["wall_s"] else 0.0


def rows_of(
    variants: Sequence[Variant], runs: Mapping[str, RunEvents], *, seed: int, epoch_steps: int
) -> list[Row]:
    """One row per variant that was run with this seed: its figures, and their ratios to others of the seed.

    `wait` goes through all tasks once in `epoch_steps` steps.
    """
    wait = _whole_epochs(runs[WAIT], epoch_steps)
    return [_row(variant, runs, seed) | _length(runs[variant.name], wait) for variant in variants]


def _row(variant: Variant, runs: Mapping[str, RunEvents], seed: int) -> Row:
    events = runs[variant.name]
    run, pace = summarise(events), rollouts_per_hour(events)
    generated = run["generated_tokens"] or 1
    row: Row = {
        "what": "run",
        "variant": variant.name,
        "over_sampling": variant.factor,
        "seed": seed,
        "rollouts_per_hour": round(pace, 1),
        "trained_tokens_per_hour": round(3600 * total(events.steps, "trained_tokens") / run["wall_s"], 1)
        if run["wall_s"]
        else 0.0,
        "left_waiting_fraction": run["buffered_tokens"] / generated,
        "reprefilled_fraction": run["reprefilled_tokens"] / generated,
        **{name: run[name] for name in KEPT},
        "alarms": len(events.alarms),
    }
    for reference in (BEST_DISCARD, DISCARD_TWICE, NAIVE):
        other = rollouts_per_hour(runs[reference]) if reference in runs else 0.0
        row[f"pace / {reference}"] = pace / other if other else None
    return row


def _whole_epochs(wait: RunEvents, epoch_steps: int) -> RunEvents:
    """The run without its last epoch where that is not whole: a mixture of all tasks in equal parts.

    `wait` makes few steps, so that the tasks of half an epoch would move its mean length by more than a strategy does.
    """
    whole = len(wait.steps) // epoch_steps * epoch_steps
    return dataclasses.replace(wait, steps=wait.steps[: whole or None])


def _length(events: RunEvents, wait: RunEvents) -> Row:
    length, reference = mean(response_tokens(events)), mean(response_tokens(wait))
    return {"length / wait": length / reference if length and reference else None}


def medians(rows: Sequence[Row]) -> list[Row]:
    """Per variant the median over its seeds of every figure that is a number in all of them."""
    found = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        values = {key: finite(row[key] for row in own) for key in own[0] if key != "seed"}
        middle = {key: statistics.median(known) for key, known in values.items() if len(known) == len(own)}
        found.append({"what": "median over seeds", "variant": name, "seeds": len(own), **middle})
    return found


def workload_row(runs: Sequence[RunEvents], group_size: int) -> Row:
    """How heavy the tail is, from rollouts that nothing cut off: those of `wait`.

    `tail_of_groups` is the mean over groups of their slowest rollout, in mean rollouts; seconds are those in the
    environment.
    """
    seconds: list[float] = []
    groups: list[list[float]] = []
    turns: list[float] = []
    for step in (step for run in runs for step in run.steps):
        own = finite(step.get("environment_s") or ())
        seconds += own
        turns += finite(step.get("turns") or ())
        if step.get("failed_rollouts") == 0:
            groups += [own[k : k + group_size] for k in range(0, len(own), group_size)]
    if not groups:
        return {"what": "workload of wait", "rollouts": 0}
    typical = statistics.fmean(seconds)
    row: Row = {"what": "workload of wait", "rollouts": len(seconds)}
    for name, values in (("environment_s", seconds), ("turns", turns)):
        row |= {
            f"{name}_p{round(100 * q)}": round(percentile(sorted(values), q), 2) for q in (0.5, 0.9, 0.99)
        }
    return row | {"tail_of_groups": statistics.fmean(max(group) for group in groups) / typical}


def targets_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The project's own bounds, for each of the candidates: one of them has to keep all."""
    candidates = [name for name in CANDIDATES if any(row["variant"] == name for row in rows)]
    return [found for name in candidates for found in _targets_of(name, rows)]


def _targets_of(name: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    def values(key: str) -> list[float]:
        return finite(row[key] for row in rows if row["variant"] == name)

    pace, lengths = "trained rollouts per hour", values("length / wait")
    return [
        *(
            target(f"{pace}, {name} / {other}", values(f"pace / {other}"), "ratio", ">=", TARGET_PACE)
            for other in (BEST_DISCARD, DISCARD_TWICE)
        ),
        target(f"wasted tokens, {name}", values("wasted_fraction"), "fraction", "<=", TARGET_WASTE),
        target(f"mean trained response, {name} / wait", lengths, "ratio", ">=", 1 - TARGET_LENGTH),
        target(f"mean trained response, {name} / wait", lengths, "ratio", "<=", 1 + TARGET_LENGTH),
    ]
