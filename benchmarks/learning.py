"""What each estimator teaches: the local job once per estimator and seed, under heavy partial rollout.

Every run gets the same wall-clock, tasks, seed, model, server and slots, as in `strategies.py`, with four times as
many groups launched as a step trains: most rollouts are cut off and resumed, some of them often. `wait` is the
reference without a stale token. What a run has learnt is the reward of its last policy on held-out tasks, played to
their end, for equal wall-clock; and the mean reward of what it trained on in the last fifth of its steps up to a number
of generated tokens that all runs of a seed reached, for equal tokens. The second is of what a policy chooses to train
on, so it is to be compared between estimators of one resume policy alone. Differences are to `grpo` under the same
resume policy and seed.

    python benchmarks/learning.py [--json] [--quick] [--seeds 0,1,2] [--variants "NAME;NAME"] [--seconds S]
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from result import publish
from slow_job import ABORT_GRACE_S, FULL, Bench

from midstream.local.events import Event, RunEvents
from midstream.local.summary import finite, mean, number, summarise, total

SECONDS, QUICK_SECONDS = 75.0, 15.0
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
TASKS, HELD_OUT_TASKS = 64, 256

CONTROL = "grpo"
# Name of a variant: its resume policy and its estimators.
VARIANTS: Mapping[str, tuple[str, str]] = {
    "wait, grpo": ("wait", CONTROL),
    "continue, grpo": ("continue", CONTROL),
    "continue, mask_prefix": ("continue", "grpo,mask_prefix"),
    "continue, lag_decay": ("continue", "grpo,lag_decay"),
    "continue, state_hash": ("continue", "state_hash"),
    "continue, prefix_is": ("continue", "grpo,prefix_is"),
    "anchor, grpo": ("anchor", CONTROL),
    "anchor, telescoped": ("anchor", "telescoped"),
    "anchor, anchored": ("anchor", "anchored"),
    "anchor, anchored_shrunk": ("anchor", "anchored_shrunk"),
}
QUICK_VARIANTS = ("continue, grpo", "continue, state_hash")

# Of the metrics of each step, what says how stale it was, and what the estimators did.
LOGGED = (
    "staleness/trajectory_mean", "staleness/token_mean", "staleness/env_mean", "staleness/env_max",
    "staleness/env_share_beyond", "staleness/prefix_log_ratio_sq", "staleness/ratio_deviation",
    "staleness/prefix_product_log_mean", "staleness/prefix_product_log_min", "staleness/prefix_product_log_max",
    "staleness/ess_lag_0", "staleness/ess_lag_1", "staleness/ess_lag_2", "staleness/ess_lag_3_4",
    "staleness/ess_lag_5_8", "credit/changed", "credit/size", "credit/prefix_weight_mean",
    "credit/prefix_weight_bounded",
)  # fmt: skip
KEPT = (
    "status", "steps", "wall_s", "trained_rollouts", "generated_tokens", "wasted_fraction", "resumes",
    "lag_environment_max", "mean_response_tokens", "reward_first", "reward_last", "reward_held_out",
)  # fmt: skip
RESULTS = ("reward_held_out", "reward_at_equal_tokens")

Row = dict[str, Any]


def main() -> None:
    options = _parse()
    quick = options.quick
    seconds = options.seconds or (QUICK_SECONDS if quick else SECONDS)
    names = options.variants or (QUICK_VARIANTS if quick else tuple(VARIANTS))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="midstream-learning-") as scratch:
        for index, seed in enumerate(options.seeds or (QUICK_SEEDS if quick else SEEDS)):
            bench = Bench(Path(scratch) / f"seed-{seed}", seed, seconds, tasks=TASKS, held_out=HELD_OUT_TASKS)
            # In turn forwards and backwards, so that no estimator always has the quieter end of the day.
            runs = bench.run(overrides_of(names if index % 2 == 0 else names[::-1]))
            rows += rows_of(runs, seed)
    publish([], [*rows, *differences(rows)], as_json=options.json)


def overrides_of(names: Sequence[str]) -> dict[str, list[str]]:
    """What sets each variant's job apart, by its name."""
    found = {}
    for name in names:
        policy, estimators = VARIANTS[name]
        found[name] = [
            f"strategy={policy}",
            f"over_sampling_factor={1 if policy == 'wait' else FULL}",
            f"midstream.credit.estimators=[{estimators}]",
            f"midstream.turns.abort_grace_s={ABORT_GRACE_S}",
        ]
    return found


def rows_of(runs: Mapping[str, RunEvents], seed: int) -> list[Row]:
    """A row for each run of a seed."""
    shared = min(total(run.steps, "generated_tokens") for run in runs.values())
    return [_row(name, run, seed, shared) for name, run in runs.items()]


def _row(name: str, run: RunEvents, seed: int, shared_tokens: int) -> Row:
    found = summarise(run)
    within = _up_to(run.steps, shared_tokens)
    last = within[-max(1, len(within) // 5) :]
    return {
        "what": "run",
        "variant": name,
        "seed": seed,
        **{key: found[key] for key in KEPT},
        "equal_tokens": shared_tokens,
        "reward_at_equal_tokens": mean([number(step.get("reward_mean")) for step in last]),
        **{key: mean([number((step.get("metrics") or {}).get(key)) for step in run.steps]) for key in LOGGED},
    }


def _up_to(steps: Sequence[Event], tokens: int) -> list[Event]:
    """The first steps, as long as all of them together generated at most so many tokens."""
    within, made = [], 0
    for step in steps:
        made += int(number(step.get("generated_tokens")) or 0)
        if made > tokens:
            break
        within.append(step)
    return within


def differences(rows: Sequence[Row]) -> list[Row]:
    """For each variant its results, and what they are above those of `grpo` under its policy, over the seeds."""
    results = {(row["variant"], row["seed"]): row for row in rows}
    found = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        control = f"{VARIANTS[name][0]}, {CONTROL}"
        seeds = [seed for variant, seed in results if variant == name]
        row: Row = {"what": "over seeds", "variant": name, "seeds": len(seeds)}
        for result in RESULTS:
            values = finite(results[name, seed][result] for seed in seeds)
            row[f"{result}_mean"] = statistics.fmean(values) if values else None
            above = finite(
                results[name, seed][result] - results[control, seed][result]
                for seed in seeds
                if (control, seed) in results
                and None not in (results[name, seed][result], results[control, seed][result])
            )
            if name != control and above:
                row[f"{result}_above_grpo"] = [statistics.fmean(above), min(above), max(above)]
        found.append(row)
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a look: one seed, two estimators, 15 s each")
    parser.add_argument(
        "--seeds", type=lambda text: [int(part) for part in text.split(",")], help="default 0,1,2"
    )
    parser.add_argument(
        "--variants", type=lambda text: text.split(";"), help="names between semicolons; default all"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"of each run (default {SECONDS:g}, quick {QUICK_SECONDS:g})"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
