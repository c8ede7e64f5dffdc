"""What a curriculum spares, on streams of prompts whose pass rates drift; and what its decisions cost.

Groups of 8 are played until a number of them has informed, that is until the prompts that can have been trained on so
many times (`passes`): by epochs without a filter (`uniform`), by epochs with the uninformative groups dropped once
they are paid for (`dapo`), and with the curriculum as it is by default. All see the same prompts and the same drift
for each policy version, a step of 32 groups that inform. Prompts whose pass rate is 1 or 0 never inform; no other way
of choosing can do better than to pay for none of them, which is the ceiling of the ratios unless it also prefers
among the others.

As in a job that launches what two steps need, 32 groups are in flight: chosen before those are known that were chosen
before them.

Recovery: after 100 steps all that was solved is solved no more, and all else is. `by source` means that two of four
sources were solved, so that few groups tell; else every prompt has to be looked at again. The figure is how many
groups it takes until, of the next 100, nine tenths as many inform as before.

    python benchmarks/curriculum.py [--json] [--quick] [--rounds SEEDS]
"""

import statistics
import time
import tracemalloc
from typing import Any

import numpy as np
from prompt_stream import GROUP, GROUPS_PER_STEP, MIXES, Result, World, play
from result import publish, target
from rounds import parse_options

from midstream.buffers.curriculum.book import Cost
from midstream.buffers.curriculum.curriculum import Curriculum, Outcome
from midstream.buffers.curriculum.drawing import Prompts
from midstream.conf.schema.curriculum import CurriculumConfig

PROMPTS, PASSES = 1_000, 20
MORE_PASSES = (2, 5, 50)
CHANGE_AT, WINDOW, LATEST = 100, 100, 1_500
MILLION = 1_000_000


def main() -> None:
    options = parse_options(__doc__)
    quick = options.quick
    seeds = range(options.rounds if options.rounds not in (4, 12) else (1 if quick else 3))
    prompts = 200 if quick else PROMPTS
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for name in MIXES:
            passes = (PASSES, *MORE_PASSES) if name == "55 % solved" and not quick else (PASSES,)
            rows += [mix_row(name, prompts, count, seed) for count in passes]
        rows += [
            recovery_row(by_source, prompts, seed, in_flight)
            for by_source in (True, False)
            for in_flight in (1, GROUPS_PER_STEP)
        ]
    rows.append(decisions(100_000 if quick else MILLION))
    publish(targets(rows), rows, as_json=options.json)


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def of(name: str, key: str = "dapo / curriculum") -> list[float]:
        return [row[key] for row in rows if row.get("mix") == name and row["passes"] == PASSES]

    errors = [row["calibration_error"] for row in rows if "calibration_error" in row]
    recovered = {
        by_source: [
            row["groups"]
            for row in rows
            if row["what"] == "recovery" and row["by_source"] == by_source and row["in_flight"] > 1
        ]
        for by_source in (True, False)
    }
    [cost] = [row for row in rows if row["what"] == "decisions"]
    return [
        target("dapo / curriculum, 55 % solved", of("55 % solved"), "rollouts", ">=", 2.0),
        target("dapo / curriculum, 30 % solved", of("30 % solved"), "rollouts", ">=", 1.3),
        target(
            "dapo / curriculum, 15 % solved, 15 % hopeless",
            of("15 % solved, 15 % hopeless"),
            "rollouts",
            ">=",
            1.3,
        ),
        target("dapo / curriculum, all inform", of("all inform"), "rollouts", ">=", 0.97),
        target("calibration error", errors, "of a pass rate", "<=", 0.05),
        target("recovery, by source", recovered[True], "groups", "<=", 50),
        target("recovery, every prompt", recovered[False], "groups", "<=", 50),
        target("a decision", cost["us"], "us a prompt that comes up", "<=", 50),
        target("memory", [cost["bytes"]], "bytes a prompt", "<=", 200),
    ]


def mix_row(name: str, prompts: int, passes: int, seed: int) -> dict[str, Any]:
    """All ways of choosing on one mix."""
    mix = MIXES[name]
    until = int(passes * prompts * (1 - mix.solved - mix.hopeless))
    results = {
        how: play(how, World(mix, prompts, seed), seed, until=until)
        for how in ("uniform", "dapo", "curriculum")
    }
    paid = {how: result.rollouts_per_informative_group for how, result in results.items()}
    return {
        "what": "mix",
        "mix": name,
        "seed": seed,
        "passes": passes,
        "dapo / curriculum": paid["dapo"] / paid["curriculum"],
        "uniform / curriculum": paid["uniform"] / paid["curriculum"],
        **{f"rollouts_per_informative_{how}": value for how, value in paid.items()},
        "calibration_error": results["curriculum"].calibration.error,
    }


def recovery_row(by_source: bool, prompts: int, seed: int, in_flight: int) -> dict[str, Any]:
    """How long it takes after everything has changed."""
    world = World(MIXES["55 % solved"], prompts, seed, by_source=by_source)
    until = (CHANGE_AT + 40) * GROUPS_PER_STEP
    result = play("curriculum", world, seed, until=until, in_flight=in_flight, change_at=CHANGE_AT)
    changed = _end_of_step(result, CHANGE_AT)
    informs = np.array(result.informs, float)
    before = informs[changed - 300 : changed].mean()
    after = informs[changed : changed + LATEST]
    shares = np.convolve(after, np.ones(WINDOW) / WINDOW, "valid")
    recovered = np.flatnonzero(shares >= 0.9 * before)
    return {
        "what": "recovery",
        "by_source": by_source,
        "in_flight": in_flight,
        "seed": seed,
        "groups": int(recovered[0]) if len(recovered) else LATEST,
        "share_before": float(before),
        "shares_after": [round(float(after[at : at + 50].mean()), 2) for at in (0, 50, 100, 200, 400)],
    }


def _end_of_step(result: Result, steps: int) -> int:
    found = np.cumsum(result.informs)
    return int(np.searchsorted(found, steps * GROUPS_PER_STEP)) + 1


def decisions(prompts: int) -> dict[str, Any]:
    """What it costs to choose among many prompts of which much is known."""
    random = np.random.default_rng(0)
    digests = np.unique(random.integers(2**63, size=prompts, dtype=np.uint64))
    sources = random.integers(4, size=len(digests)).astype(np.int32)
    tracemalloc.start()
    begun = time.perf_counter()
    curriculum = Curriculum(
        CurriculumConfig(enabled=True),
        Prompts(digests, sources, list("abcd")),
        group_size=GROUP,
        groups_per_step=GROUPS_PER_STEP,
        seed=0,
        shuffle=True,
    )
    ready_s = time.perf_counter() - begun
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    solved = random.random(len(digests)) < 0.55
    curriculum.book.successes[:] = np.where(solved, 8, 4)
    curriculum.book.failures[:] = np.where(solved, 0, 4)
    per_prompt, per_group, observed = [], [], []
    for _ in range(20):
        begun = time.perf_counter()
        positions = curriculum.take(100)
        took = time.perf_counter() - begun
        tallies = curriculum.end_step().values()
        came_up = sum(tally.skipped + tally.played for tally in tallies)
        per_prompt.append(1e6 * took / came_up)
        per_group.append(1e6 * took / len(positions))
        begun = time.perf_counter()
        for position in positions:
            rewards = [1.0] * 8 if solved[position] else [1.0, 0.0] * 4
            curriculum.observe(Outcome(int(digests[position]), rewards, Cost(tokens=1.0)))
        observed.append(1e6 * (time.perf_counter() - begun) / len(positions))
    return {
        "what": "decisions",
        "prompts": len(digests),
        "us": per_prompt,
        "us_per_group": statistics.median(per_group),
        "us_to_observe_a_group": statistics.median(observed),
        "bytes": (size + digests.nbytes + sources.nbytes) / len(digests),
        "ready_s": ready_s,
    }


if __name__ == "__main__":
    main()
