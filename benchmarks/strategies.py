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

`--still` holds the policy still: what strategies choose to train on, apart from what they teach.

    python benchmarks/strategies.py [--json] [--quick] [--still] [--seeds 0,1,2] [--policies P,P] [--seconds S]
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
from slow_job import ABORT_GRACE_S, FULL, GROUP_SIZE, GROUPS, TASKS, Bench

from midstream.conf.compose import known_strategies
from midstream.local.events import RunEvents

SEARCHED = (1.25, 1.5, 2.0, 3.0, FULL)  # 1 would be `wait`
QUICK_SEARCHED = (2.0, FULL)
SEARCH_SHARE = 0.4  # of a run's time

# Long beside a rollout, since what waits at the end counts as wasted and is longer than the rest.
SECONDS, QUICK_SECONDS = 90.0, 15.0
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
QUICK_POLICIES = ("wait", "discard", "continue")

HELD_OUT_TASKS = 64
STILL_LR = 1e-12
FORGETFUL = ("discard", "restart")  # nothing of what they cut off is used, so they need not wait for it


def main() -> None:
    options = _parse()
    quick = options.quick
    seconds = options.seconds or (QUICK_SECONDS if quick else SECONDS)
    seeds = options.seeds or (QUICK_SEEDS if quick else SEEDS)
    policies = options.policies or (QUICK_POLICIES if quick else known_strategies())
    more = [f"trainer.lr={STILL_LR}"] if options.still else []
    with tempfile.TemporaryDirectory(prefix="midstream-strategies-") as scratch:
        search = Bench(Path(scratch) / "search", seeds[0], seconds * SEARCH_SHARE, more=more)
        best, rows = search_discard(search, QUICK_SEARCHED if quick else SEARCHED)
        variants = variants_of(policies, best)
        waits: list[RunEvents] = []
        for number, seed in enumerate(seeds):
            bench = Bench(Path(scratch) / f"seed-{seed}", seed, seconds, held_out=HELD_OUT_TASKS, more=more)
            # In turn forwards and backwards, so that no policy always has the quieter end of the day.
            runs = bench.run(overrides_of(variants if number % 2 == 0 else variants[::-1]))
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


def overrides_of(variants: Sequence[Variant]) -> dict[str, list[str]]:
    """What sets each variant's job apart, by the variant's name."""
    return {
        variant.name: [
            f"strategy={variant.strategy}",
            f"over_sampling_factor={variant.factor}",
            f"midstream.turns.abort_grace_s={0.0 if variant.strategy in FORGETFUL else ABORT_GRACE_S}",
        ]
        for variant in variants
    }


def search_discard(bench: Bench, factors: Sequence[float]) -> tuple[float, list[Row]]:
    """The over-sampling at which `discard` trains most rollouts per hour, and a row for each that was tried."""
    tried = [Variant(f"discard, {factor:g}x", "discard", factor) for factor in factors]
    runs = bench.run(overrides_of(tried))
    paces = dict(zip(factors, map(rollouts_per_hour, runs.values()), strict=True))
    rows = [
        {"what": "search", "variant": "discard", "over_sampling": factor, "rollouts_per_hour": round(pace, 1)}
        for factor, pace in paces.items()
    ]
    return max(paces, key=lambda factor: paces[factor]), rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a look: one seed, three policies, 15 s each")
    parser.add_argument("--seeds", type=_numbers, help="default 0,1,2; the search uses the first")
    parser.add_argument("--policies", type=lambda text: text.split(","), help="default: all of conf/strategy")
    parser.add_argument("--still", action="store_true", help=f"a learning rate of {STILL_LR:g}")
    parser.add_argument("--seconds", type=float, help="of each run (default 90, quick 15)")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
