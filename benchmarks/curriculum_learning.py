"""What the curriculum buys in learning: the job `mixed` with and without it, reward against generated tokens.

Of the job's tasks 55 % pass whatever the agent does and 15 % never do, so that at the start some 70 % of the groups
teach nothing. `continue` trains on all of them, `dapo` plays them and drops them, `curriculum` passes over those that
it expects to be of no use. All else is the same: model, tasks, seed, server, over-sampling, wall-clock.

Each run's policies are scored as it goes, on tasks that can be learnt and that none was trained on, the same for all
strategies of a seed; its clock stands still meanwhile. Runs of a seed generate different numbers of tokens in the same
time, so they are compared up to the smallest of these numbers (`equal_tokens`):

- `reward_at_equal_tokens`: what the policy scores there, between two scores on the line through them;
- `mean_reward_to_equal_tokens`: the mean height of that curve from the start to there. It rests on all scores of a run
  and not on two, so it is the steadier one: read it first;
- `reward_held_out`: the score of the last policy, for equal wall-clock.

A score of 192 tasks has a standard error of up to 0.036, a difference of two up to 0.05: over three seeds only larger
ones say something. The rewards of steps are of what a strategy trained on: filtered ones stay near 0.5 whatever is
learnt, so they are no result here. `tokens_per_informative_group` is the price of what can teach at all, and tells
`curriculum` from `dapo` with much less noise than rewards do. `--keep` leaves the run directories: the report of each
seed draws the curves.

    python benchmarks/curriculum_learning.py [--json] [--quick] [--seeds 0,1,2] [--strategies continue,dapo,curriculum]
                                             [--seconds S] [--keep FOLDER]
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from result import publish
from told import run_jobs

from midstream.conf.compose import compose
from midstream.conf.schema import JobConfig
from midstream.local.events import RunEvents
from midstream.local.report.plots.reward import held_out_curve
from midstream.local.summary import finite, summarise, total
from midstream.local.tasks.mixed import write_mixed_tasks

SECONDS, QUICK_SECONDS = 90.0, 15.0
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
HELD_OUT_TASKS, QUICK_HELD_OUT_TASKS = 192, 32
LEARNABLE = "medium"
"""The source of `mixed` on which policies are scored."""

# Steps from one score to the next, so that each run has about five: a step that drops groups takes several times as
# long as one that does not.
SCORED_EVERY: Mapping[str, int] = {"continue": 5, "dapo": 2, "curriculum": 3}

KEPT = (
    "status", "steps", "wall_s", "trained_rollouts", "generated_tokens", "wasted_fraction", "resumes",
    "mean_response_tokens", "reward_held_out",
)  # fmt: skip
RESULTS = (
    "mean_reward_to_equal_tokens", "reward_at_equal_tokens", "reward_held_out", "tokens_per_informative_group",
)  # fmt: skip

Row = dict[str, Any]


def main() -> None:
    options = _parse()
    quick = options.quick
    seconds = options.seconds or (QUICK_SECONDS if quick else SECONDS)
    held_out = QUICK_HELD_OUT_TASKS if quick else HELD_OUT_TASKS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="midstream-curriculum-") as scratch:
        for index, seed in enumerate(options.seeds or (QUICK_SEEDS if quick else SEEDS)):
            folder = (options.keep or Path(scratch)) / f"seed-{seed}"
            # In turn forwards and backwards, so that no strategy always has the quieter end of the day.
            names = options.strategies if index % 2 == 0 else options.strategies[::-1]
            rows += rows_of(run_jobs(configs_of(names, folder, seed, seconds, held_out)), seed)
    publish([], [*rows, *differences(rows)], as_json=options.json)


def configs_of(
    strategies: Sequence[str], folder: Path, seed: int, seconds: float, held_out: int
) -> dict[str, JobConfig]:
    """One job for each strategy, with held-out tasks of the source that can be learnt."""
    tasks = compose(["job=mixed"]).tasks
    path = write_mixed_tasks(
        folder / "learnable.jsonl",
        held_out,
        {LEARNABLE: tasks.sources[LEARNABLE]},
        source_key="source",
        seed=seed,
        split="held_out",
    )
    return {
        name: compose(
            [
                "job=mixed",
                f"strategy={name}",
                f"seed={seed}",
                f"run_dir='{folder}'",
                f"midstream.run_dir='{folder}/{name}'",
                "steps=100000",
                f"max_seconds={seconds}",
                f"tasks.held_out={held_out}",
                f"tasks.held_out_path='{path}'",
                f"tasks.held_out_every={SCORED_EVERY.get(name, 5)}",
            ]
        )
        for name in strategies
    }


def rows_of(runs: Mapping[str, RunEvents], seed: int) -> list[Row]:
    """A row for each run of a seed."""
    shared = min(total(run.steps, "generated_tokens") for run in runs.values())
    return [_row(name, run, seed, shared) for name, run in runs.items()]


def _row(name: str, run: RunEvents, seed: int, shared_tokens: int) -> Row:
    found = summarise(run)
    tokens, rewards, _ = held_out_curve(run)
    informative = total(run.steps, "informative_groups")
    dropped = sum(len(step.get("dropped_groups") or ()) for step in run.steps)
    return {
        "what": "run",
        "strategy": name,
        "seed": seed,
        **{key: found[key] for key in KEPT},
        "trained_groups": total(run.steps, "groups"),
        "informative_groups": informative,
        "dropped_groups": dropped,
        "tokens_per_informative_group": found["generated_tokens"] / informative if informative else None,
        "equal_tokens": shared_tokens,
        "reward_at_equal_tokens": height_at(shared_tokens, tokens, rewards),
        "mean_reward_to_equal_tokens": mean_height(shared_tokens, tokens, rewards),
        "curve": [[round(x), y] for x, y in zip(tokens, rewards, strict=True)],
    }


def height_at(end: float, xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The height at `end` of the line through the points; None without points."""
    return float(np.interp(end, xs, ys)) if ys else None


def mean_height(end: float, xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The mean height from the first point to `end` of the line through the points; None where there is none."""
    if not ys or end <= xs[0]:
        return None
    inner = [x for x in xs if x < end]
    edges = np.array([*inner, end])
    heights = np.interp(edges, xs, ys)
    return float(np.sum(np.diff(edges) * (heights[1:] + heights[:-1]) / 2) / (end - xs[0]))


def differences(rows: Sequence[Row]) -> list[Row]:
    """For each strategy its results over the seeds, and what they are above those of each other one, seed by seed."""
    results = {(row["strategy"], row["seed"]): row for row in rows}
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    found = []
    for name in names:
        seeds = [seed for strategy, seed in results if strategy == name]
        row: Row = {"what": "over seeds", "strategy": name, "seeds": len(seeds)}
        for result in RESULTS:
            values = finite(results[name, seed][result] for seed in seeds)
            row[f"{result}_mean"] = statistics.fmean(values) if values else None
            for other in names:
                above = [
                    results[name, seed][result] - results[other, seed][result]
                    for seed in seeds
                    if None not in (results[name, seed][result], results[other, seed][result])
                ]
                if name != other and above:
                    row[f"{result}_above_{other}"] = [statistics.fmean(above), min(above), max(above)]
        found.append(row)
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a look: one seed, 15 s each, 32 held-out tasks")
    parser.add_argument(
        "--seeds", type=lambda text: [int(part) for part in text.split(",")], help="default 0,1,2"
    )
    parser.add_argument(
        "--strategies", type=lambda text: text.split(","), default=list(SCORED_EVERY), help="default all"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"of each run (default {SECONDS:g}, quick {QUICK_SECONDS:g})"
    )
    parser.add_argument("--keep", type=Path, help="a folder for the run directories, one for each seed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
