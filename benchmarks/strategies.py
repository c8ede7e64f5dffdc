"""What each resume policy buys: the local job once per policy and seed, on the same tasks, for the same time.

Every run gets the same wall-clock, tasks, seed, model, server and number of slots: rollouts that are played at once,
as an engine's cache and a pool of sandboxes bound them. A policy that cuts off launches so many groups that the
slots stay full. `discard` is run with the over-sampling that trains most rollouts per hour, which is searched for
first, and at 2x. `wait` cannot over-sample. Ratios are between runs of one seed.

Workload: chain-fix with slow tools (`midstream.local.tasks.slow_tools`). Most tasks are short and some long; every
call takes a log-normal time, so that rollouts of one group differ and the slowest of them holds up its group. What
that makes of the tail stands in a row of its own, measured on `wait`. Times are those of a coding agent, scaled down
with the step: a step takes seconds here, and so takes a rollout; a call takes some tenths of a second.

Wasted are generated tokens that no loss saw, those that still wait at the run's end included; tokens that had to be
read again (re-prefilled) are counted apart. The last policy of each run is scored on held-out tasks, played to
their end, because the rewards of trained rollouts are those of what a strategy chooses to train on.

    python benchmarks/strategies.py [--json] [--quick] [--seeds 0,1,2] [--policies wait,continue] [--seconds S]
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison import (
    BEST_DISCARD,
    DISCARD_TWICE,
    WAIT,
    Row,
    Variant,
    medians,
    rollouts_per_hour,
    rows_of,
    targets_of,
    workload_row,
)
from result import publish

from midstream.conf.compose import compose, known_strategies
from midstream.conf.schema import JobConfig
from midstream.local.compare import compare
from midstream.local.events import RunEvents, read_run
from midstream.local.progress import SilentProgress
from midstream.local.resume import strategy_dir
from midstream.local.tasks.chain_fix import write_tasks
from midstream.local.tasks.slow_tools import ToolTimes, write_slow_tasks

GROUPS, GROUP_SIZE = 4, 8  # of a training step
# Rollouts that are played at once, half as many again as a batch has: `wait` has all of its own in play, and
# `discard` throws away about as much as it does in published jobs.
SLOTS = 48
FULL = 4.0  # groups launched per group needed: enough for a slot to find a rollout whenever it is free
SEARCHED = (1.25, 1.5, 2.0, 3.0, FULL)  # 1 would be `wait`
QUICK_SEARCHED = (2.0, FULL)
SEARCH_SHARE = 0.4  # of a run's time

# Long beside a rollout, since what waits at the end counts as wasted and is longer than the rest.
SECONDS, QUICK_SECONDS = 90.0, 15.0
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
QUICK_POLICIES = ("wait", "discard", "continue")

TASKS = 8  # few, so that `wait` too plays all of them several times, and lengths compare on the same mixture
HELD_OUT_TASKS = 64
DIFFICULTY = 1.0
# The slowest hundredth of calls takes four times the median (the tasks' own spread apart).
TIMES = ToolTimes(median_s=0.35, spread=0.6, task_spread=0.2, longest_s=5.0)
ABORT_GRACE_S = 0.2  # the default is for calls of seconds
FORGETFUL = ("discard", "restart")  # nothing of what they cut off is used, so they need not wait for it


def main() -> None:
    options = _parse()
    quick = options.quick
    seconds = options.seconds or (QUICK_SECONDS if quick else SECONDS)
    seeds = options.seeds or (QUICK_SEEDS if quick else SEEDS)
    policies = options.policies or (QUICK_POLICIES if quick else known_strategies())
    with tempfile.TemporaryDirectory(prefix="midstream-strategies-") as scratch:
        search = Bench(Path(scratch) / "search", seeds[0], seconds * SEARCH_SHARE)
        best, rows = search_discard(search, QUICK_SEARCHED if quick else SEARCHED)
        variants = variants_of(policies, best)
        waits: list[RunEvents] = []
        for number, seed in enumerate(seeds):
            bench = Bench(Path(scratch) / f"seed-{seed}", seed, seconds, held_out=HELD_OUT_TASKS)
            # In turn forwards and backwards, so that no policy always has the quieter end of the day.
            runs = bench.run(variants if number % 2 == 0 else variants[::-1])
            rows += rows_of(variants, runs, seed=seed, epoch_steps=TASKS // GROUPS)
            waits.append(runs[WAIT])
    measured = [row for row in rows if row["what"] == "run"]
    rows += [*medians(measured), workload_row(waits, GROUP_SIZE)]
    publish(targets_of(measured), rows, as_json=options.json)


def variants_of(policies: Sequence[str], best_discard: float) -> list[Variant]:
    """What is compared; `wait` and `discard` always, since the others are measured by them."""
    others = [name for name in policies if name not in (WAIT, "discard")]
    return [
        Variant(WAIT, WAIT, 1.0),
        Variant(BEST_DISCARD, "discard", best_discard),
        Variant(DISCARD_TWICE, "discard", 2.0),
        *(Variant(name, name, FULL) for name in others),
    ]


def search_discard(bench: "Bench", factors: Sequence[float]) -> tuple[float, list[Row]]:
    """The over-sampling at which `discard` trains most rollouts per hour, and a row for each that was tried."""
    runs = bench.run([Variant(f"discard, {factor:g}x", "discard", factor) for factor in factors])
    paces = dict(zip(factors, map(rollouts_per_hour, runs.values()), strict=True))
    rows = [
        {"what": "search", "variant": "discard", "over_sampling": factor, "rollouts_per_hour": round(pace, 1)}
        for factor, pace in paces.items()
    ]
    return max(paces, key=lambda factor: paces[factor]), rows


class Bench:
    """Runs variants one after the other on one server and one set of tasks."""

    def __init__(self, folder: Path, seed: int, seconds: float, *, held_out: int = 0) -> None:
        self._folder = folder
        self._seed = seed
        self._seconds = seconds
        self._held_out = held_out
        self._tasks = write_slow_tasks(folder / "tasks.jsonl", TASKS, TIMES, seed=seed, difficulty=DIFFICULTY)
        # Scoring needs no slow tools.
        self._held_out_tasks = write_tasks(
            folder / "held_out.jsonl", HELD_OUT_TASKS, seed=seed, difficulty=DIFFICULTY, split="held_out"
        )

    def run(self, variants: Sequence[Variant]) -> Mapping[str, RunEvents]:
        """What was recorded, by the variant's name."""
        configs = {variant.name: self._config(variant, number) for number, variant in enumerate(variants)}
        compare(configs, progress=_Told(), command=sys.argv)
        return {name: read_run(strategy_dir(config)) for name, config in configs.items()}

    def _config(self, variant: Variant, number: int) -> JobConfig:
        return compose(
            [
                "job=quick",
                f"strategy={variant.strategy}",
                f"over_sampling_factor={variant.factor}",
                f"seed={self._seed}",
                f"run_dir={self._folder}",
                f"midstream.run_dir={self._folder}/{number}-{variant.strategy}",
                "steps=100000",
                f"max_seconds={self._seconds}",
                f"rollout.rollout_batch_size={GROUPS}",
                f"rollout.n_samples_per_prompt={GROUP_SIZE}",
                f"rollout.sglang_server_concurrency={SLOTS}",
                f"tasks.path={self._tasks}",
                f"tasks.held_out={self._held_out}",
                f"tasks.held_out_path={self._held_out_tasks}",
                f"midstream.turns.abort_grace_s={0.0 if variant.strategy in FORGETFUL else ABORT_GRACE_S}",
                f"midstream.environment.step_timeout_s={4 * TIMES.longest_s}",
            ]
        )


class _Told(SilentProgress):
    """A line for each run on standard error: the whole takes the better part of an hour."""

    def alarm(self, message: str) -> None:
        print(f"alarm: {message}", file=sys.stderr, flush=True)

    def strategy_finished(self, name: str, run: Mapping[str, Any]) -> None:
        print(
            f"{name}: {run['steps']} steps in {run['wall_s']:.0f} s, {run['trained_rollouts']} rollouts trained",
            file=sys.stderr,
            flush=True,
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a look: one seed, three policies, 15 s each")
    parser.add_argument("--seeds", type=_numbers, help="default 0,1,2; the search uses the first")
    parser.add_argument("--policies", type=lambda text: text.split(","), help="default: all of conf/strategy")
    parser.add_argument("--seconds", type=float, help="of each run (default 90, quick 15)")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
